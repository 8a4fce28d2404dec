from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.slot_pool import Slots
from loraplex.adapters.slot_tensors import SlotTensors, slot_bytes
from loraplex.adapters.weights import AdapterWeights
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import BASE, QV, lora_tensors, write_adapter


def make_tensors(*, num_slots: int = 6, slot_rank: int = 4, dtype: torch.dtype = torch.float32) -> SlotTensors:
    return SlotTensors.allocate(BASE, num_slots=num_slots, slot_rank=slot_rank, dtype=dtype, device="cpu")


def poison(tensors: SlotTensors) -> None:
    pools = tensors.pools
    for tensor in (*pools.lora_a.values(), *pools.lora_b.values(), pools.scaling):
        tensor.fill_(float("nan"))


def load(folder: Path, *, rank: int = 8, projections: tuple[Projection, ...] = tuple(Projection)) -> AdapterWeights:
    return load_weights(write_adapter(folder, lora_tensors(rank=rank, projections=projections), r=rank), BASE)


def delta(tensors: SlotTensors, slots: Slots, layer: int, projection: Projection) -> Tensor:
    """What the slots add to the weight: sum over slots of scaling * B^T A."""
    pools = tensors.pools
    ids = slots.attention if projection.is_attention else slots.mlp
    parts = [
        pools.scaling[layer, projection, slot]
        * (pools.lora_b[projection][layer, slot].t() @ pools.lora_a[projection][layer, slot])
        for slot in ids
    ]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("rank", [1, 3, 4, 7, 8])
def test_the_slots_hold_the_adapter_and_zeros_whatever_lay_there_before(tmp_path: Path, rank: int) -> None:
    tensors, weights = make_tensors(), load(tmp_path, rank=rank)
    poison(tensors)
    num = -(-rank // 4)
    slots = Slots((5, 1)[:num], (0, 3)[:num])
    list(tensors.write(weights, slots, max_piece_bytes=1 << 20))
    for module in weights.modules:
        expected = weights.scaling[module.layer, module.projection] * (module.lora_b @ module.lora_a)
        torch.testing.assert_close(delta(tensors, slots, module.layer, module.projection), expected)


def test_projections_that_the_adapter_lacks_are_zero(tmp_path: Path) -> None:
    tensors = make_tensors()
    poison(tensors)
    slots = Slots((2, 3), ())
    list(tensors.write(load(tmp_path, projections=QV), slots, max_piece_bytes=1 << 20))
    for projection in (Projection.K, Projection.O):
        for pool in (tensors.pools.lora_a[projection], tensors.pools.lora_b[projection]):
            assert torch.count_nonzero(pool[:, list(slots.attention)]) == 0
        assert torch.count_nonzero(tensors.pools.scaling[:, projection, list(slots.attention)]) == 0


def test_other_slots_are_not_touched(tmp_path: Path) -> None:
    tensors = make_tensors()
    poison(tensors)
    list(tensors.write(load(tmp_path), Slots((2, 4), (1, 0)), max_piece_bytes=1 << 20))
    for projection in Projection:
        others = [0, 1, 3, 5] if projection.is_attention else [2, 3, 4, 5]
        for pool in (tensors.pools.lora_a[projection], tensors.pools.lora_b[projection]):
            assert torch.isnan(pool[:, others]).all()
        assert torch.isnan(tensors.pools.scaling[:, projection, others]).all()


def test_pieces_are_bounded_and_add_up_to_the_slots(tmp_path: Path) -> None:
    tensors, weights = make_tensors(), load(tmp_path)
    pieces = list(tensors.write(weights, Slots((0, 1), (0, 1)), max_piece_bytes=1_100))
    assert max(pieces) <= 1_100
    scaling_bytes = 2 * 7 * BASE.num_layers * 4
    assert sum(pieces) == 2 * slot_bytes(BASE, slot_rank=4, dtype=torch.float32) - scaling_bytes


def test_slot_bytes_are_the_bytes_allocated() -> None:
    pools = make_tensors(num_slots=6).pools
    total = sum(tensor.nbytes for tensor in (*pools.lora_a.values(), *pools.lora_b.values(), pools.scaling))
    assert total == 6 * slot_bytes(BASE, slot_rank=4, dtype=torch.float32)


def test_a_narrower_pool_rounds_once_and_stays_finite(tmp_path: Path) -> None:
    tensors, weights = make_tensors(dtype=torch.float16), load(tmp_path)
    list(tensors.write(weights, Slots((0, 1), (0, 1)), max_piece_bytes=1 << 20))
    module = weights.modules[0]
    pool = tensors.pools.lora_a[module.projection][module.layer]
    assert torch.equal(torch.cat([pool[0], pool[1]]), module.lora_a.to(torch.float16))
    assert tensors.pools.scaling.dtype == torch.float32


def test_too_few_slots_are_a_misfit_and_not_a_cut(tmp_path: Path) -> None:
    tensors, weights = make_tensors(), load(tmp_path)
    assert tensors.misfit(weights, Slots((0, 1), (0, 1))) is None
    fault = tensors.misfit(weights, Slots((0, 1), (0,)))
    assert fault is not None
    assert "rank 8 in the MLP layers, but was given slots for 4" in fault
