"""Reads what a decoder is from its Hugging Face folder, without torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.hf_config import HFConfig, read_json_object


def read_model_config(folder: Path) -> ModelConfig:
    """Read `config.json` and, for the end tokens, `generation_config.json`.

    Raises:
        ConfigurationError: unreadable, not a supported family, or a feature that is not supported.
    """
    raw = HFConfig.read(folder / "config.json")
    return ModelConfig(
        model_type=raw.model_type,
        dtype=raw.checkpoint_dtype,
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        intermediate_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_attention_heads=raw.num_attention_heads,
        num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
        head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
        rms_norm_eps=raw.rms_norm_eps,
        max_position_embeddings=raw.max_position_embeddings,
        rope=raw.rope,
        rope_layers=raw.rope_layers,
        sliding_windows=raw.sliding_windows,
        has_qkv_bias=raw.has_attention_bias or raw.model_type == "qwen2",
        has_o_bias=raw.has_attention_bias,
        has_mlp_bias=raw.mlp_bias and raw.model_type in ("llama", "smollm3"),
        has_qk_norm=raw.model_type == "qwen3",
        tie_word_embeddings=raw.tie_word_embeddings,
        eos_token_ids=_eos_token_ids(folder, raw),
    )


def _eos_token_ids(folder: Path, raw: HFConfig) -> frozenset[int]:
    """`generation_config.json` wins where it names any, as in transformers' `generate`."""
    given: object = None
    if (folder / "generation_config.json").exists():
        given = read_json_object(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        given = raw.eos_token_id
    try:
        ids = msgspec.convert(given, int | list[int] | None)
    except msgspec.ValidationError:
        raise ConfigurationError(
            f"eos_token_id is {given!r}; it must be an integer or a list of integers", param="model"
        ) from None
    return frozenset([ids] if isinstance(ids, int) else ids or ())
