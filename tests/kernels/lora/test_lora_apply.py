"""`lora_apply` against the slow loops, over popularity, batch, rank, width, fused slices and dtype."""

from __future__ import annotations

import math

import pytest
import torch

from loraplex.kernels.lora.metadata import Projection, SelectionSlots, WeightedSlot
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

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_right(batch: Batch) -> None:
    delta = lora_delta(
        batch.x,
        batch.pools,
        layer=batch.layer,
        projections=batch.projections,
        token_selection=batch.token_selection,
        selections=batch.selections,
    )
    assert_close(batch.run(), batch.base.double() + delta, batch.x.dtype)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 16, 133])
@pytest.mark.parametrize("kind", POPULARITIES)
def test_equals_the_loops_for_every_popularity(kind: str, num_tokens: int) -> None:
    selections = [selection_of(ids) for ids in ([3], [5, 6], [0, 1, 2, 4], [9], [10], [23, 8, 22])]
    assert_right(create_batch(create_pools(), selections, popularity(kind, num_tokens, len(selections))))


@pytest.mark.parametrize("rank", [1, 4, 8, 16, 33, 64, 128])
@pytest.mark.parametrize("hidden", [41, 64])
def test_equals_the_loops_for_every_rank(rank: int, hidden: int) -> None:
    """A rank that is not a multiple of the slot's has zero rows at the end of its last slot."""
    pools = create_pools(hidden=hidden, out=(hidden, 7, 32), num_slots=40)
    slots = list(range(40 - math.ceil(rank / 8), 40))
    rows_left = rank - 8 * (len(slots) - 1)
    for pool in (*pools.lora_a.values(), *pools.lora_b.values()):
        pool[:, slots[-1], rows_left:] = 0
    assert_right(create_batch(pools, [selection_of(slots), selection_of([0])], [0, 1, -1, 0, 0, 1, 0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize(
    ("projections", "out"), [((Projection.O,), (96,)), (GATE_UP, (352, 352)), (QKV, (131, 64, 64))]
)
def test_equals_the_loops_for_every_fusion_and_dtype(
    projections: tuple[Projection, ...], out: tuple[int, ...], pool_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    pools = create_pools(projections=projections, out=out, dtype=pool_dtype)
    selections = [selection_of([0]), selection_of([7, 3]), selection_of([23])]
    assert_right(create_batch(pools, selections, [2, -1, 0, 1, 1, 1, 2, 0, -1], dtype=dtype))


@pytest.mark.parametrize("slot_rank", [1, 3, 16])
def test_equals_the_loops_for_every_slot_rank(slot_rank: int) -> None:
    pools = create_pools(slot_rank=slot_rank)
    assert_right(create_batch(pools, [selection_of([1, 2]), selection_of([4])], [0, 1, -1] * 9))


def test_a_mix_is_the_weighted_sum_of_its_parts() -> None:
    mix = selection_of([2, 3, 11], weights=[0.75, 0.75, -1.5])
    assert_right(create_batch(create_pools(), [mix, selection_of([2])], [0, 1, 0, -1]))


def test_the_spaces_have_their_own_slots() -> None:
    only_mlp = SelectionSlots((), (WeightedSlot(4, 1.0),))
    both = SelectionSlots((WeightedSlot(1, 1.0),), (WeightedSlot(0, 1.0), WeightedSlot(2, 0.5)))
    for projections, out in ((QKV, (96, 32, 32)), (GATE_UP, (64, 64))):
        batch = create_batch(create_pools(projections=projections, out=out), [only_mlp, both], [0, 1, -1, 1, 0])
        assert_right(batch)
        assert torch.equal(batch.run()[2], batch.base[2])


def test_a_selection_without_slots_in_a_space_leaves_its_rows_alone() -> None:
    only_mlp = SelectionSlots((), (WeightedSlot(4, 1.0),))
    batch = create_batch(create_pools(), [only_mlp], [0, 0, -1])
    assert torch.equal(batch.run(), batch.base)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_selection_keep_their_bits(dtype: torch.dtype) -> None:
    """KN-01: -1 must not index the last slot, which is in use here."""
    token_selection = [0, 1, -1, 0, 2, -1, 1, 2]
    batch = create_batch(
        create_pools(), [selection_of([0]), selection_of([1, 2]), selection_of([23])], token_selection, dtype=dtype
    )
    y = batch.run()
    base_rows = [2, 5]
    assert torch.equal(y[base_rows], batch.base[base_rows])
    assert not any(torch.equal(y[row], batch.base[row]) for row in range(8) if row not in base_rows)


def test_a_step_without_selections_changes_nothing() -> None:
    batch = create_batch(create_pools(), [], [-1, -1, -1])
    assert batch.meta() is None
    assert torch.equal(batch.run(), batch.base)
    assert create_batch(create_pools(), [], []).run().shape == (0, 160)


def test_nan_in_unused_slots_and_in_other_rows_never_leaks() -> None:
    pools = poison_unused_slots(create_pools(), used=[0, 3, 4])
    batch = create_batch(pools, [selection_of([3]), selection_of([0, 4])], [0, -1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    assert_right(batch)
    clean = batch.run()
    batch.x[[1, 2]] = torch.nan  # a base row, and a row that shares its chunk with others
    poisoned = batch.run()
    others = [row for row in range(len(batch.x)) if row not in (1, 2)]
    assert torch.equal(poisoned[others], clean[others])
    assert torch.equal(poisoned[1], batch.base[1])


def test_takes_rows_and_outputs_that_are_not_contiguous() -> None:
    batch = create_batch(create_pools(), [selection_of([3])], [0, -1, 0])
    wide = torch.randn(3, 2, 96)
    wide[:, 1] = batch.x
    strided = Batch(
        pools=batch.pools,
        selections=batch.selections,
        token_selection=batch.token_selection,
        x=wide[:, 1],
        base=batch.base,
    )
    assert torch.equal(strided.run(), batch.run())


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 65, 257, 1024])
@pytest.mark.parametrize("swapped", [False, True])
def test_every_size_uses_its_own_slots(num_tokens: int, swapped: bool) -> None:
    """KN-02: a fast path above some size that takes the first slot for everybody shows here."""
    small, large = selection_of([0]), selection_of([1, 2, 3])
    if swapped:
        small, large = selection_of([3]), selection_of([0, 1, 2])
    pools = create_pools(hidden=32, out=(32, 16, 16), num_slots=4)
    assert_right(create_batch(pools, [small, large], [token % 3 - 1 for token in range(num_tokens)]))
    assert_right(create_batch(pools, [small, large], [1] * num_tokens))
