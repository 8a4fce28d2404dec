"""`store_kv` and `paged_attention` against the slow loops; every unused place of every cache here is NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.attention.helpers import PagedBatch, create_paged_batch
from tests.kernels.oracle import assert_close

DECODES = [(0, 1), (1, 1), (15, 1), (16, 1), (40, 1)]
MIXED = [(5, 1), (31, 1), (0, 1), (0, 2), (0, 33), (16, 16), (20, 7)]


def assert_right(batch: PagedBatch) -> None:
    for actual, expected in zip(batch.run(), batch.expected(), strict=True):
        assert_close(actual, expected, batch.queries[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_equals_the_loops_for_every_dtype(lens: list[tuple[int, int]], dtype: torch.dtype) -> None:
    assert_right(create_paged_batch(lens, dtype=dtype))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 128), (4, 4, 80), (1, 1, 2), (6, 2, 34)]
)
def test_equals_the_loops_for_every_grouping_of_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    assert_right(
        create_paged_batch(MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=8)
    )


@pytest.mark.parametrize("sliding_window", [1, 2, 15, 16, 17, 64])
def test_a_query_sees_no_key_before_its_window(sliding_window: int) -> None:
    assert_right(create_paged_batch([*DECODES, *MIXED], sliding_window=sliding_window))


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_equals_the_loops_for_every_block_size(block_size: int) -> None:
    assert_right(create_paged_batch(MIXED, block_size=block_size))


def test_a_long_prompt_over_a_long_context() -> None:
    assert_right(create_paged_batch([(700, 1), (500, 200), (0, 300)], num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_a_sequence_alone_equals_the_sequence_in_a_crowd(sliding_window: int | None) -> None:
    batch = create_paged_batch([*DECODES, *MIXED], sliding_window=sliding_window)
    for sequence, together in enumerate(batch.run()):
        assert torch.equal(batch.take(sequence).run()[0], together)


def test_keys_before_the_window_are_never_read() -> None:
    batch = create_paged_batch([(50, 1), (40, 3)], sliding_window=8)
    expected = batch.expected()
    for key, value, last_unseen in zip(batch.keys, batch.values, (43, 33), strict=True):
        # whole blocks before the window, as after their reuse by somebody else
        key[: last_unseen // 16 * 16] = torch.nan
        value[: last_unseen // 16 * 16] = torch.nan
    for actual, wanted in zip(batch.run(), expected, strict=True):
        assert_close(actual, wanted, torch.float32)


@pytest.mark.parametrize("sliding_window", [None, 3])
@pytest.mark.parametrize("context", [0, 20])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_within_a_prefill_nan_reaches_only_the_queries_that_see_it(
    sliding_window: int | None, context: int, bad: float
) -> None:
    batch = create_paged_batch([(context, 12), (7, 5)], sliding_window=sliding_window)
    expected = batch.expected()
    place = context + 6
    batch.keys[0][place], batch.values[0][place] = bad, bad
    actual = batch.run()
    blind = [row for row in range(12) if row < 6 or (sliding_window is not None and row >= 6 + sliding_window)]
    assert_close(actual[0][blind], expected[0][blind], torch.float32)
    assert_close(actual[1], expected[1], torch.float32)
    seeing = [row for row in range(12) if row not in blind]
    assert not actual[0][seeing].isfinite().flatten(1).all(dim=-1).any()


def test_store_kv_writes_its_places_and_no_other() -> None:
    batch = create_paged_batch([(3, 1), (10, 8)])
    meta = batch.meta()
    cache = batch.cache(meta)
    before = cache.key.flatten(0, 1).clone()
    new = torch.randn(9, 2, 32)
    from loraplex.kernels.attention.reference import store_kv

    store_kv(new, 2 * new, cache, meta.slot_mapping)
    assert torch.equal(cache.key.flatten(0, 1)[meta.slot_mapping], new)
    assert torch.equal(cache.value.flatten(0, 1)[meta.slot_mapping], 2 * new)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[meta.slot_mapping] = False
    torch.testing.assert_close(cache.key.flatten(0, 1)[untouched], before[untouched], rtol=0, atol=0, equal_nan=True)
