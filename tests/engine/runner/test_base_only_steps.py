"""Resident adapters cost a step nothing when no request of it uses one: not a single LoRA kernel is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.request import Request
from loraplex.kernels.cpu.backend import CpuBackend
from loraplex.kernels.dispatch import LayerStack
from loraplex.kernels.lora.metadata import LoRAMeta, SelectionSlots, WeightedSlot
from tests.engine.runner.driver import World, create_pools
from tests.engine.runner.helpers import create_request
from tests.helpers import make_checkpoint

CPU = torch.device("cpu")
NUM_ADAPTERS = 8


class CountingBackend(CpuBackend):
    """Counts its LoRA calls, which the composed layers make."""

    num_lora_calls = 0

    def lora_apply(self, *args: Any, **kwargs: Any) -> None:
        self.num_lora_calls += 1
        super().lora_apply(*args, **kwargs)


@dataclass
class RecordingStack:
    """The fused layers, which call LoRA for every chunk of a step's layout; remembers those layouts."""

    stack: LayerStack
    layouts: list[LoRAMeta | None] = field(default_factory=list)

    def forward(self, hidden: Tensor, kv_caches: Sequence[Any], **kwargs: Any) -> tuple[Tensor, Tensor] | None:
        self.layouts.append(kwargs["lora"])
        return self.stack.forward(hidden, kv_caches, **kwargs)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder: Path = make_checkpoint(tmp_path_factory.mktemp("base"))
    return load_model(folder, read_model_config(folder), backend=CountingBackend(CPU), dtype=torch.float32, device=CPU)


def requests_of(num: int) -> list[Request]:
    return [create_request(prompt=[1 + i, 2, 3], temperature=0.0, max_tokens=12) for i in range(num)]


def slots_of(requests: Sequence[Request]) -> dict[Request, SelectionSlots]:
    each = [(WeightedSlot(index % NUM_ADAPTERS, 1.0),) for index in range(len(requests))]
    return {request: SelectionSlots(slot, slot) for request, slot in zip(requests, each, strict=True)}


def test_composed_layers_call_no_lora_kernel_for_the_base(model: DecoderModel) -> None:
    backend = model.backend
    assert isinstance(backend, CountingBackend)
    composed = replace(model, fused=None)
    world = World.over(composed, create_pools(composed, num_slots=NUM_ADAPTERS))
    base, adapted = requests_of(3), requests_of(NUM_ADAPTERS)
    world.step([*base, *adapted], slots=slots_of(adapted))
    num_calls = backend.num_lora_calls
    assert num_calls == 4 * len(model.layers), "qkv, o, gate_up, down"
    for _ in range(3):  # those with adapters have ended
        world.step(base)
    world.step([*base, *requests_of(2)])  # a prefill beside decodes
    assert backend.num_lora_calls == num_calls


def test_fused_layers_get_no_lora_layout_for_the_base(model: DecoderModel) -> None:
    assert model.fused is not None
    stack = RecordingStack(model.fused)
    recorded = replace(model, fused=stack)
    world = World.over(recorded, create_pools(recorded, num_slots=NUM_ADAPTERS))
    base, adapted = requests_of(3), requests_of(NUM_ADAPTERS)
    world.step([*base, *adapted], slots=slots_of(adapted))
    (layout,) = stack.layouts
    assert layout is not None
    assert layout.num_chunks == NUM_ADAPTERS
    for _ in range(3):
        world.step(base)
    world.step([*base, *requests_of(2)])
    assert stack.layouts[1:] == [None] * 4
