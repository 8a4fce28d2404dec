"""`config.json` as every family writes it, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.model_folder import read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    """A Llama's file with these fields changed; ... removes a field."""
    merged = {key: value for key, value in (LLAMA | fields).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_config(folder)


def test_a_llama_of_2023_has_the_defaults_of_its_time(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=..., num_key_value_heads=..., torch_dtype="float16")
    assert config.num_kv_heads == 4
    assert config.head_dim == 16
    assert config.dtype == "float16"
    assert config.rope.theta == 10000.0
    assert config.rms_norm_eps == 1e-6
    assert not config.tie_word_embeddings
    assert config.sliding_windows == (None,) * 4
    assert config.rope_layers == (True,) * 4


@pytest.mark.parametrize(
    ("model_type", "fields", "windows"),
    [
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {"sliding_window": 9, "layer_types": ["full_attention"] * 4}, (9,) * 4),
        ("qwen2", {"sliding_window": 9}, (None,) * 4),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 9)),
        ("qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
        ("smollm3", {"sliding_window": 9, "use_sliding_window": True}, (None, None, None, 9)),
        ("llama", {"sliding_window": 9}, (None,) * 4),
    ],
)
def test_sliding_windows(
    tmp_path: Path, model_type: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, model_type=model_type, **fields).sliding_windows == windows


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("llama", (True, True, True, False)),
        ("mistral", (False, False, False, False)),
        ("qwen2", (True, False, False, False)),
        ("qwen3", (True, True, False, True)),
        ("smollm3", (True, True, True, False)),
    ],
)
def test_a_family_has_only_the_biases_and_norms_that_it_knows(
    tmp_path: Path, model_type: str, expected: tuple[bool, ...]
) -> None:
    config = read(tmp_path, model_type=model_type, attention_bias=True, mlp_bias=True)
    assert (config.has_qkv_bias, config.has_o_bias, config.has_mlp_bias, config.has_qk_norm) == expected


def test_smollm3_leaves_every_fourth_layer_without_rope(tmp_path: Path) -> None:
    config = read(tmp_path, model_type="smollm3")
    assert config.rope_layers == (True, True, True, False)
    assert config.rope.theta == 2_000_000.0
    assert config.tie_word_embeddings
    assert read(tmp_path, model_type="smollm3", no_rope_layers=[0, 1, 0, 1]).rope_layers == (False, True, False, True)


def test_qwen3_has_its_own_head_dim(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="qwen3").head_dim == 128
    assert read(tmp_path, model_type="qwen3", head_dim=32).head_dim == 32


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = read(tmp_path, rope_parameters=rope | {"rope_theta": 5e5})
    assert config.max_context_len == 512
    assert config.rope.theta == 5e5
    assert config.rope.attention_factor == pytest.approx(1.1386294)
    assert read(tmp_path).max_context_len == 128


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 4.0}, 512),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128),
    ],
)
def test_linear_scaling_stretches_the_context_too_and_llama3_says_it_stretched(
    tmp_path: Path, rope: dict[str, Any], expected: int
) -> None:
    assert read(tmp_path, rope_scaling=rope).max_context_len == expected


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, None, {2}),
        ([2, 7], None, {2, 7}),
        (2, {"eos_token_id": [5, 6]}, {5, 6}),
        (2, {"temperature": 0.6}, {2}),
        (..., None, set()),
    ],
)
def test_end_tokens(tmp_path: Path, config_eos: Any, generation: dict[str, Any] | None, expected: set[int]) -> None:
    assert read(tmp_path, generation, eos_token_id=config_eos).eos_token_ids == expected


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are llama, mistral, qwen2, qwen3, smollm3"),
    ({"model_type": "mixtral"}, "model_type 'mixtral'"),
    ({"model_type": "phi3"}, "model_type 'phi3'"),
    ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
    ({"model_type": ...}, "model_type None"),
    ({"model_type": ["llama"]}, "model_type"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config (method 'awq')"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported is silu"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'"),
    ({"hidden_size": ...}, "hidden_size"),
    ({"hidden_size": "64"}, "hidden_size"),
    ({"hidden_size": 0}, "hidden_size is 0; it must be at least 1"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
    ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads (3)"),
    ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
    ({"hidden_size": 66}, "hidden_size (66) is not a multiple"),
    ({"head_dim": 15}, "head_dim is 15"),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported; supported are default",
    ),
    ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "rope type 'mrope'"),
    ({"rope_scaling": {"type": "linear"}}, "needs a factor"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"eos_token_id": "</s>"}, "eos_token_id"),
    (
        {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["chunked_attention"] * 4},
        "layer type 'chunked_attention'",
    ),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types has 1 entries for 4 layers"),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0"),
    ({"rope_theta": -1.0}, "rope_theta is -1.0"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSALS, ids=[message[:40] for _, message in REFUSALS])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        read(tmp_path, **fields)
    assert message in str(refusal.value)
    assert refusal.value.param == "model"


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json does not exist"):
        read_model_config(tmp_path)
    for content, message in (("{", "not readable JSON"), ("[]", "not a JSON object"), ("\xff", "not readable JSON")):
        (tmp_path / "config.json").write_text(content, encoding="latin-1")
        with pytest.raises(ConfigurationError, match=message):
            read_model_config(tmp_path)


def test_configuration_and_base_spec_need_no_torch() -> None:
    """The platform's process reads them, and starts in time for that."""
    code = (
        "import sys, loraplex.engine.models.config, loraplex.engine.models.base_spec; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
