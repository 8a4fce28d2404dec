"""All layers in one call against the same layers function by function; and each backend against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.models.weight_names import projection_shape
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from tests.engine.models.helpers import CPU, PagedRunner, prompt, save_checkpoint, transformers_logits

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral-window": {"model_type": "mistral", "sliding_window": 20},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "smollm3": {"model_type": "smollm3"},
}
SELECTIONS = [((3, 1.0),), ((5, 0.5), (0, 2.0), (7, 1.0))]


def load_on(backend: str, folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = read_model_config(folder)
    return load_model(folder, config, backend=create_backend(backend, CPU), dtype=dtype, device=CPU)


def create_pools(model: DecoderModel, dtype: torch.dtype) -> LoRAPools:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return 0.1 * torch.randn(shape, generator=generator)

    layers, shapes = model.config.num_layers, {p: projection_shape(model.config, p) for p in Projection}
    return LoRAPools(
        lora_a={p: normal(layers, 8, 4, shape[1]).to(dtype) for p, shape in shapes.items()},
        lora_b={p: normal(layers, 8, 4, shape[0]).to(dtype) for p, shape in shapes.items()},
        scaling=normal(layers, len(Projection), 8),
    )


def run(model: DecoderModel, pools: LoRAPools | None = None) -> list[Tensor]:
    """Prompts in chunks beside each other, then token by token; with pools, two of them through adapters."""
    slots = [SelectionSlots(part, part) for part in (tuple(WeightedSlot(*s) for s in each) for each in SELECTIONS)]
    runner = PagedRunner(
        model,
        [prompt(length, seed=length) for length in (60, 33, 9)],
        selections=None if pools is None else [1, -1, 0],
        slots=() if pools is None else slots,
        pools=pools,
    )
    return runner.run(16, decode_from=40)


def assert_same_bytes(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_equal_the_composed_ones_to_the_last_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_on("cpu", save_checkpoint(tmp_path, **FAMILIES[family]), dtype)
    composed = replace(model, fused=None)
    assert model.fused is not None
    assert_same_bytes(run(model), run(composed))
    for pool_dtype in (torch.float32, torch.bfloat16):
        pools = create_pools(model, pool_dtype)
        with_lora = run(model, pools)
        assert_same_bytes(with_lora, run(composed, pools))
        assert not torch.equal(with_lora[0], run(model)[0])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_backend_equals_transformers(family: str, backend: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, **FAMILIES[family])
    for length, logits in zip((60, 33, 9), run(load_on(backend, folder)), strict=True):
        expected = transformers_logits(folder, prompt(length, seed=length))
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_sequence_in_a_crowd_has_the_bytes_of_the_sequence_alone(tmp_path: Path) -> None:
    """On the cpu backend nothing of a row depends on its neighbours, the base's products included."""
    model = load_on("cpu", save_checkpoint(tmp_path, "llama"), torch.bfloat16)
    prompts = [prompt(length, seed=length) for length in (1, 15, 16, 40, 73)]
    crowd = PagedRunner(model, prompts).run(16, decode_from=20)
    for ids, together in zip(prompts, crowd, strict=True):
        assert_same_bytes([PagedRunner(model, [ids]).run(16, decode_from=20)[0]], [together])


@pytest.mark.parametrize("num_threads", [2, 3])
def test_the_number_of_threads_changes_no_bit(num_threads: int, tmp_path: Path) -> None:
    """Threads claim the base's panels and the adapters' parts side by side; with more of them, in smaller parts."""
    model = load_on("cpu", save_checkpoint(tmp_path, "llama"), torch.bfloat16)
    pools = create_pools(model, torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = run(model, pools)
        torch.set_num_threads(num_threads)
        for _ in range(5):
            assert_same_bytes(run(model, pools), alone)
    finally:
        torch.set_num_threads(before)


def test_adapters_in_float16_are_composed_and_counted(tmp_path: Path) -> None:
    model = load_on("cpu", save_checkpoint(tmp_path, "llama"))
    pools = create_pools(model, torch.float16)
    for actual, expected in zip(run(model, pools), run(replace(model, fused=None), pools), strict=True):
        assert torch.equal(actual, expected)
    assert model.backend.fallbacks["layers"] > 0


def test_float16_models_have_no_fused_layers(tmp_path: Path) -> None:
    assert load_on("cpu", save_checkpoint(tmp_path, "llama"), torch.float16).fused is None


def test_the_reference_backend_has_no_fused_layers(tmp_path: Path) -> None:
    assert load_on("reference", save_checkpoint(tmp_path, "llama")).fused is None
