"""KN-07 at the kernel: the bytes of a row's delta are the same in every batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.lora.helpers import GATE_UP, QKV, Batch, create_batch, create_pools, selection_of

# rank 8, 64, 16, 24 (a mix), 8
SELECTIONS = (
    selection_of([0]),
    selection_of(range(1, 9)),
    selection_of([9, 10]),
    selection_of([11, 12, 9], weights=[0.5, 0.5, 2.0]),
    selection_of([23]),
)


def assert_same_bytes_alone_and_in_the_crowd(batch: Batch, rows: list[int]) -> None:
    crowd = batch.run()
    for row in rows:
        assert torch.equal(batch.take([row]).run()[0], crowd[row])


@pytest.mark.parametrize(("hidden", "out"), [(576, (576, 192, 192)), (96, (131, 64, 7)), (131, (33, 33, 5))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_alone_equals_the_row_in_a_crowd(hidden: int, out: tuple[int, ...], dtype: torch.dtype) -> None:
    pools = create_pools(hidden=hidden, out=out)
    token_selection = [0, 1, -1, 2, 3, 4, 1, 1, 1, 0, 0, 3, 4, 2, 2, -1] * 4
    batch = create_batch(pools, SELECTIONS, token_selection, dtype=dtype)
    assert_same_bytes_alone_and_in_the_crowd(batch, [*range(16), 40, 55, 63])


@pytest.mark.parametrize("slot_rank", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("hidden", [576, 1536])
def test_a_row_alone_equals_the_row_in_a_crowd_for_every_slot_rank(slot_rank: int, hidden: int) -> None:
    pools = create_pools(hidden=hidden, out=(576,), projections=QKV[:1], slot_rank=slot_rank)
    batch = create_batch(pools, SELECTIONS, [0, 1, -1, 2, 3, 4, 1, 1] * 4)
    assert_same_bytes_alone_and_in_the_crowd(batch, list(range(8)))


def test_decode_equals_prefill() -> None:
    """A prompt of 300 tokens of one selection, token by token, in chunks and whole."""
    pools = create_pools(hidden=576, out=(1536, 1536), projections=GATE_UP)
    for selection in (0, 1, 3):
        batch = create_batch(pools, SELECTIONS, [selection] * 300)
        whole = batch.run()
        for chunk in (1, 16, 64, 299):
            pieces = range(0, 300, chunk) if chunk > 1 else (0, 7, 8, 150, 299)
            for start in pieces:
                rows = list(range(start, min(start + chunk, 300)))
                assert torch.equal(batch.take(rows).run(), whole[rows])


def test_twenty_equal_runs_give_equal_bytes() -> None:
    pools = create_pools(hidden=576, out=(576, 192, 192))
    batch = create_batch(pools, SELECTIONS, [1, 0, 2, 3, 4, 1, -1, 1])
    first = batch.run()
    assert all(torch.equal(batch.run(), first) for _ in range(20))


@settings(max_examples=25, deadline=None)
@given(
    token_selection=st.lists(st.integers(-1, len(SELECTIONS) - 1), min_size=1, max_size=40),
    data=st.data(),
)
def test_permuting_and_thinning_the_batch_changes_no_row(token_selection: list[int], data: st.DataObject) -> None:
    batch = create_batch(create_pools(hidden=192, out=(192, 64, 64)), SELECTIONS, token_selection)
    whole = batch.run()
    order = data.draw(st.permutations(range(len(token_selection))))
    kept = order[: data.draw(st.integers(1, len(order)))]
    assert torch.equal(batch.take(kept).run(), whole[list(kept)])


def test_longer_tables_of_others_change_no_row() -> None:
    pools = create_pools(hidden=576, out=(576, 192, 192), num_slots=64)
    long = selection_of(range(32, 64))
    batch = create_batch(pools, [selection_of([0]), selection_of([1, 2]), long], [0, 1, 0, 2, 2, 1])
    alone = batch.take([0, 1, 2, 5]).run()
    assert torch.equal(batch.run()[[0, 1, 2, 5]], alone)
