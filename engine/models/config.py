"""What a decoder is, read from `config.json` without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.hf_config import HFConfig, ModelDType, read_json_object
from loraplex.engine.models.rope_config import RopeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the supported families; the model's code asks only this, never the family's name."""

    model_type: str
    dtype: ModelDType  # of the checkpoint, as config.json says; float32 when it does not
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    rope_layers: tuple[bool, ...]  # per layer: are q and k rotated
    sliding_windows: tuple[int | None, ...]  # per layer: keys that a query sees, itself included; None = all
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Read `config.json` and, for the end tokens, `generation_config.json`.

        Raises:
            ConfigurationError: unreadable, not a supported family, or a feature that is not supported.
        """
        raw = HFConfig.read(path / "config.json")
        return cls(
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
            eos_token_ids=_eos_token_ids(path, raw),
        )

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context_len(self) -> int:
        """Tokens that the position embeddings were made for.

        `max_position_embeddings` of a file with yarn or linear scaling may be the length before or after it.
        """
        return max(self.max_position_embeddings, int(self.rope.stretched_max_position_embeddings))


def _eos_token_ids(path: Path, raw: HFConfig) -> frozenset[int]:
    """`generation_config.json` wins where it names any, as in transformers' `generate`."""
    given: object = None
    if (path / "generation_config.json").exists():
        given = read_json_object(path / "generation_config.json").get("eos_token_id")
    if given is None:
        given = raw.eos_token_id
    try:
        ids = msgspec.convert(given, int | list[int] | None)
    except msgspec.ValidationError:
        raise ConfigurationError(
            f"eos_token_id is {given!r}; it must be an integer or a list of integers", param="model"
        ) from None
    return frozenset([ids] if isinstance(ids, int) else ids or ())
