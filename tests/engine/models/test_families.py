"""Every family and rope type against transformers, with prompts longer than windows and original contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.models.helpers import PagedRunner, edit_config, load, prompt, save_checkpoint, transformers_logits

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1000.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-mha": {"model_type": "llama", "num_key_value_heads": 6},
    "llama-head-dim": {"model_type": "llama", "head_dim": 24},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3, "max_position_embeddings": 256},
    "linear": {"model_type": "llama", "rope_parameters": LINEAR},
    "yarn": {"model_type": "llama", "rope_parameters": YARN},
    "yarn-whole-range": {
        "model_type": "qwen2",
        "rope_parameters": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    },
    "yarn-attention-factor": {"model_type": "qwen3", "rope_parameters": YARN | {"attention_factor": 0.7}},
    "yarn-mscale": {"model_type": "llama", "rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.3}},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "mistral-window": {"model_type": "mistral", "sliding_window": 20},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 2,
    },
    "qwen2-layer-types": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-bias-window": {
        "model_type": "qwen3",
        "head_dim": 16,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "smollm3": {"model_type": "smollm3"},
    "smollm3-list": {"model_type": "smollm3", "no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": False},
    "smollm3-window": {
        "model_type": "smollm3",
        "use_sliding_window": True,
        "sliding_window": 11,
        "no_rope_layer_interval": 2,
        "attention_bias": True,
        "mlp_bias": True,
    },
}

LENGTH = 100  # beyond every window and original context above, and beyond max_position_embeddings


def assert_logits_equal(actual: Tensor, expected: Tensor) -> None:
    assert expected.std() > 0.5, "logits too flat to show a fault"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    """In one pass; in chunks; and as a chunk and single tokens beside another sequence."""
    folder = save_checkpoint(tmp_path, **FAMILIES[family])
    expected = transformers_logits(folder, prompt(LENGTH))
    model = load(folder)
    other = prompt(70, seed=1)
    assert_logits_equal(PagedRunner(model, [prompt(LENGTH)]).run(LENGTH)[0], expected)
    assert_logits_equal(PagedRunner(model, [prompt(LENGTH), other]).run(16)[0], expected)
    assert_logits_equal(PagedRunner(model, [other, prompt(LENGTH)]).run(37, decode_from=80)[1], expected)


FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": (FAMILIES["llama"], {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": (FAMILIES["linear"], {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3": (FAMILIES["llama3"], {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "yarn": (FAMILIES["yarn"], {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "yarn-attention-factor": (FAMILIES["yarn-attention-factor"], {"rope_parameters": YARN}),
    "mistral-window": (FAMILIES["mistral-window"], {"sliding_window": 4096}),
    "qwen2-window": (FAMILIES["qwen2-window"], {"max_window_layers": 4, "layer_types": None}),
    "smollm3-rope": (FAMILIES["smollm3"], {"no_rope_layers": [1, 1, 1, 1]}),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_left_out_would_show(feature: str, tmp_path: Path) -> None:
    """The comparison above is only worth something if it is this sensitive."""
    fields, without = FEATURES[feature]
    folder = save_checkpoint(tmp_path, **fields)
    right = PagedRunner(load(folder), [prompt(LENGTH)]).run(LENGTH)[0]
    wrong = PagedRunner(load(edit_config(folder, **without)), [prompt(LENGTH)]).run(LENGTH)[0]
    assert (right - wrong).abs().max() > 0.05


def test_the_old_spelling_means_the_same(tmp_path: Path) -> None:
    """rope_theta and rope_scaling with `type`, torch_dtype, no head_dim: as files before 2025 say it."""
    new = save_checkpoint(tmp_path / "new", **FAMILIES["yarn"])
    old = save_checkpoint(tmp_path / "old", **FAMILIES["yarn"])
    edit_config(
        old,
        rope_parameters=None,
        rope_theta=1000.0,
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        dtype=None,
        torch_dtype="float32",
        head_dim=None,
    )
    logits = [PagedRunner(load(folder), [prompt(LENGTH)]).run(LENGTH)[0] for folder in (new, old)]
    assert torch.equal(logits[0], logits[1])
    assert_logits_equal(logits[1], transformers_logits(old, prompt(LENGTH)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_the_same_model_to_its_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, **FAMILIES["llama-biases"], dtype=dtype)
    model = load(folder, dtype)
    expected = transformers_logits(folder, prompt(40))
    actual = PagedRunner(model, [prompt(40)]).run(16)[0]
    assert model.dtype == dtype
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().mean() < 0.05 * expected.std()


def test_a_sequence_in_a_crowd_equals_the_sequence_alone(tmp_path: Path) -> None:
    model = load(save_checkpoint(tmp_path, **FAMILIES["qwen3"]))
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 40, 73)]
    crowd = PagedRunner(model, prompts).run(16, decode_from=20)
    for ids, together in zip(prompts, crowd, strict=True):
        alone = PagedRunner(model, [ids]).run(16, decode_from=20)[0]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5 * alone.abs().max().item())
