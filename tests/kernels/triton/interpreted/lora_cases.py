"""`lora_apply` of the triton backend in the interpreter. Scratch is NaN, and so is every slot nobody uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from loraplex.kernels.lora import triton as launcher
from loraplex.kernels.lora.metadata import LoRAMeta, Projection, SelectionSlots, WeightedSlot
from loraplex.kernels.triton_backend import TritonBackend
from tests.kernels.lora import helpers
from tests.kernels.lora.helpers import (
    GATE_UP,
    POPULARITIES,
    QKV,
    Batch,
    create_batch,
    create_pools,
    poison_unused_slots,
    popularity,
    selection_of,
)
from tests.kernels.oracle import assert_close, lora_delta
from tests.kernels.triton.interpreter import prepare
from tests.kernels.triton.pairwise import pairwise

prepare()
BACKEND = TritonBackend(80)

# Slots of rank 8: 64 (over several tiles), 16, 8, 24 with weights, nothing, and the last slot.
SELECTIONS = (
    selection_of([20, 1, 9, 2, 11, 4, 13, 0]),
    selection_of([6, 5]),
    selection_of([3]),
    selection_of([7, 3, 22], weights=[0.75, -0.5, 2.0]),
    selection_of([]),
    selection_of([23]),
)


@dataclass(frozen=True)
class Fusion:
    projections: Sequence[Projection]
    in_features: int
    out: Sequence[int]


FUSIONS = (
    Fusion(QKV, 96, (131, 64, 32)),
    Fusion(GATE_UP, 41, (70, 70)),
    Fusion((Projection.O,), 576, (96,)),
    Fusion((Projection.DOWN,), 1536, (33,)),  # four splits
)


@pytest.fixture(autouse=True)
def _use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "BACKEND", BACKEND)


def assert_right(batch: Batch) -> None:
    y = batch.run()
    delta = lora_delta(
        batch.x,
        batch.pools,
        layer=batch.layer,
        projections=batch.projections,
        token_selection=batch.token_selection,
        selections=batch.selections,
    )
    assert_close(y, batch.base.double() + delta, batch.x.dtype)
    untouched = [
        row for row, index in enumerate(batch.token_selection) if index < 0 or not batch.selections[index].attention
    ]
    assert torch.equal(_bits(y[untouched]), _bits(batch.base[untouched]))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "dtypes", "fusion", "slot_rank"),
    pairwise(
        POPULARITIES,
        [1, 7, 37, 133],
        [
            (torch.float32, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.float32),
        ],
        FUSIONS,
        [8, 16, 3],
    ),
)
def test_equals_the_loops(
    kind: str, num_tokens: int, dtypes: tuple[torch.dtype, torch.dtype], fusion: Fusion, slot_rank: int
) -> None:
    dtype, pool_dtype = dtypes
    pools = create_pools(
        hidden=fusion.in_features,
        out=fusion.out,
        projections=fusion.projections,
        slot_rank=slot_rank,
        dtype=pool_dtype,
    )
    used = [slot.slot_id for selection in SELECTIONS for slot in selection.attention]
    poison_unused_slots(pools, used)
    batch = create_batch(pools, SELECTIONS, popularity(kind, num_tokens, len(SELECTIONS)), dtype=dtype)
    batch.base[:, 0] = -0.0  # which adding a zero would change
    assert_right(batch)


def test_a_delta_on_16_bit_is_rounded_once() -> None:
    """The intermediate keeps its precision: against a base of zero the result is the rounded exact delta, nearly."""
    batch = create_batch(create_pools(dtype=torch.bfloat16), SELECTIONS, [2] * 5, dtype=torch.bfloat16)
    batch.base.zero_()
    delta = lora_delta(
        batch.x,
        batch.pools,
        layer=1,
        projections=batch.projections,
        token_selection=batch.token_selection,
        selections=batch.selections,
    )
    torch.testing.assert_close(batch.run().double(), delta, rtol=2**-8, atol=2**-14 * delta.abs().max().item())


def test_the_spaces_have_their_own_slots() -> None:
    only_mlp = SelectionSlots((), (WeightedSlot(4, 1.0),))
    both = SelectionSlots((WeightedSlot(1, 1.0),), (WeightedSlot(0, 1.0), WeightedSlot(2, 0.5)))
    for projections, out in ((QKV, (96, 32, 32)), (GATE_UP, (64, 64))):
        batch = create_batch(create_pools(projections=projections, out=out), [only_mlp, both], [0, 1, -1, 1, 0])
        delta = lora_delta(
            batch.x,
            batch.pools,
            layer=1,
            projections=projections,
            token_selection=batch.token_selection,
            selections=batch.selections,
        )
        assert_close(batch.run(), batch.base.double() + delta, torch.float32)
    nobody = create_batch(create_pools(), [only_mlp], [0, -1])
    assert torch.equal(nobody.run(), nobody.base)


def test_a_longer_slot_table_than_one_load_takes() -> None:
    pools = create_pools(hidden=32, out=(16,), projections=QKV[:1], num_slots=90)
    assert_right(create_batch(pools, [selection_of(range(10, 83)), selection_of([5])], [0, 1, -1, 0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_a_crowd(dtype: torch.dtype) -> None:
    pools = create_pools(hidden=576, out=(96, 32, 32))
    batch = create_batch(pools, SELECTIONS, [0, 1, -1, 2, 3, 5, *[2] * 33, 0, 3], dtype=dtype)
    crowd = batch.run()
    for row in (0, 3, 4, 38, 40):
        assert torch.equal(batch.take([row]).run()[0], crowd[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_delta_has_the_same_bits_however_its_splits_are_dealt_out(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Few chunks: a program a split. Many: a program for all splits."""
    pools = create_pools(hidden=1536, out=(33, 16), projections=GATE_UP)
    batch = create_batch(pools, SELECTIONS, [0, 2, -1, 3, 2], dtype=dtype)
    batch.base.zero_()
    monkeypatch.setattr(launcher, "LORA_FULL_GRID", 10**9)
    split = batch.run()
    monkeypatch.setattr(launcher, "LORA_FULL_GRID", 1)
    assert torch.equal(batch.run(), split)
    assert split[[0, 1, 3, 4]].all()


def test_padding_to_a_fixed_capacity_changes_nothing() -> None:
    """The layout that a CUDA graph is captured with: chunks of selection -1 and rows in no chunk, full of nonsense."""
    batch = create_batch(create_pools(), SELECTIONS, [0, 2, -1, 3, 2])
    meta = batch.meta()
    assert meta is not None
    padded = _pad(meta, num_chunks=9, num_rows=20)
    y = batch.base.clone()
    BACKEND.lora_apply(batch.x, y, batch.pools, layer=1, projections=batch.projections, meta=padded)
    assert torch.equal(y, batch.run())


def _pad(meta: LoRAMeta, *, num_chunks: int, num_rows: int) -> LoRAMeta:
    def padded(tensor: Tensor, length: int, value: int) -> Tensor:
        return torch.cat((tensor, torch.full((length - len(tensor),), value, dtype=tensor.dtype)))

    return replace(
        meta,
        token_order=padded(meta.token_order, num_rows, 10**12),
        chunk_selection=padded(meta.chunk_selection, num_chunks, -1),
        chunk_start=padded(meta.chunk_start, num_chunks, 10**9),
        chunk_len=padded(meta.chunk_len, num_chunks, 32),
    )


def test_takes_rows_that_are_not_contiguous() -> None:
    batch = create_batch(create_pools(), SELECTIONS, [0, -1, 2])
    wide = torch.full((3, 2, 96), torch.nan)
    wide[:, 1] = batch.x
    assert torch.equal(replace(batch, x=wide[:, 1]).run(), batch.run())


def test_nan_in_one_row_stays_there() -> None:
    batch = create_batch(create_pools(), SELECTIONS, [0, 2, 2, -1, 2])
    clean = batch.run()
    batch.x[1] = torch.nan
    poisoned = batch.run()
    others = [0, 2, 3, 4]
    assert torch.equal(poisoned[others], clean[others])
    assert poisoned[1].isnan().all()
