"""Popularity x odd batches x fused slices x odd widths x dtype, each rank in every batch, against the slow loops."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch

from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots
from tests.kernels.lora.helpers import (
    GATE_UP,
    POPULARITIES,
    QKV,
    create_batch,
    create_pools,
    poison_unused_slots,
    popularity,
    selection_of,
)
from tests.kernels.oracle import assert_close, lora_delta

RANKS = (1, 4, 8, 16, 33, 64, 128)
SLICES = {1: ((Projection.O,), (57,)), 2: (GATE_UP, (70, 70)), 3: (QKV, (96, 31, 32))}


@cache
def create_world(num_slices: int, hidden: int, dtype: torch.dtype) -> tuple[LoRAPools, list[SelectionSlots]]:
    """One selection of each rank, their slots scattered and the last one used; unused slots are NaN."""
    projections, out = SLICES[num_slices]
    pools = create_pools(hidden=hidden, out=out, projections=projections, num_slots=37, dtype=dtype)
    order = iter(torch.randperm(37, generator=torch.Generator().manual_seed(2)).tolist())
    selections = []
    for rank in RANKS:
        slots = [next(order) for _ in range(math.ceil(rank / 8))]
        for pool in (*pools.lora_a.values(), *pools.lora_b.values()):
            pool[:, slots[-1], rank - 8 * (len(slots) - 1) :] = 0
        selections.append(selection_of(slots))
    poison_unused_slots(pools, [slot.slot_id for each in selections for slot in each.attention])
    return pools, selections


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [41, 64])
@pytest.mark.parametrize("num_slices", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 133])
@pytest.mark.parametrize("kind", POPULARITIES)
def test_the_matrix(kind: str, num_tokens: int, num_slices: int, hidden: int, dtype: torch.dtype) -> None:
    pools, selections = create_world(num_slices, hidden, dtype)
    batch = create_batch(pools, selections, popularity(kind, num_tokens, len(selections)), dtype=dtype)
    y = batch.run()
    delta = lora_delta(
        batch.x,
        pools,
        layer=batch.layer,
        projections=batch.projections,
        token_selection=batch.token_selection,
        selections=selections,
    )
    assert_close(y, batch.base.double() + delta, dtype)
    base_rows = [row for row, selection in enumerate(batch.token_selection) if selection < 0]
    assert torch.equal(y[base_rows], batch.base[base_rows])
