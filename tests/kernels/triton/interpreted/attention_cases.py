"""Everything about attention of the triton backend in the interpreter; every unused place of a cache is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from loraplex.kernels.attention import composed, triton_decode
from loraplex.kernels.attention.metadata import AttentionMeta
from loraplex.kernels.triton_backend import TritonBackend
from tests.kernels.attention import helpers
from tests.kernels.attention.helpers import PagedBatch, create_paged_batch
from tests.kernels.attention.test_matrix import DISTRIBUTIONS, tokens
from tests.kernels.attention.test_norm_rotary_store import *  # noqa: F403 - on this backend
from tests.kernels.attention.test_norm_rotary_store import SLOTS, create_cache, create_transform
from tests.kernels.oracle import assert_close
from tests.kernels.triton.interpreter import prepare
from tests.kernels.triton.pairwise import pairwise

prepare()
BACKEND = TritonBackend(80)

DECODES = ((0, 1), (1, 1), (15, 1), (16, 1), (255, 1), (256, 1))  # a partition holds 256 keys
LONG_DECODES = ((40, 1), (700, 1))
PREFILLS = ((0, 2), (0, 33), (16, 16), (20, 7))
MIXED = ((5, 1), (31, 1), (0, 1), (0, 2), (30, 18))
LENS = (DECODES, LONG_DECODES, PREFILLS, MIXED)


@pytest.fixture(autouse=True)
def _use_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "BACKEND", BACKEND)


def assert_right(batch: PagedBatch) -> None:
    for actual, expected in zip(batch.run(), batch.expected(), strict=True):
        assert_close(actual, expected, batch.queries[0].dtype)


@pytest.mark.parametrize(
    ("lens", "dtype", "heads", "block_size", "sliding_window"),
    pairwise(
        LENS,
        [torch.float32, torch.bfloat16, torch.float16],
        [(9, 3, 64), (8, 1, 128), (4, 4, 80), (6, 2, 34)],
        [16, 32, 5],
        [None, 1, 9, 300],
    ),
)
def test_equals_the_loops(
    lens: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    sliding_window: int | None,
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    assert_right(
        create_paged_batch(
            lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_size=block_size,
            sliding_window=sliding_window,
        )
    )


@pytest.mark.parametrize(
    ("kind", "num_seqs", "phase", "sliding_window", "dtype"),
    pairwise(DISTRIBUTIONS, [1, 3, 7], ["decode", "prefill", "mixed"], [None, 9], [torch.float32, torch.bfloat16]),
)
def test_equals_the_loops_for_every_distribution_of_lengths(
    kind: str, num_seqs: int, phase: str, sliding_window: int | None, dtype: torch.dtype
) -> None:
    lens = tokens(kind, num_seqs, phase)
    assert_right(
        create_paged_batch(
            lens, num_heads=3, num_kv_heads=1, head_dim=18, block_size=7, dtype=dtype, sliding_window=sliding_window
        )
    )


def test_more_partitions_than_one_load_merges() -> None:
    assert_right(create_paged_batch([(17 * 256 + 3, 1), (2, 1)], num_heads=2, num_kv_heads=1))


@pytest.mark.parametrize("sliding_window", [None, 20, 600])
def test_a_part_takes_several_partitions_of_a_long_sequence(
    monkeypatch: pytest.MonkeyPatch, sliding_window: int | None
) -> None:
    """Of the first parts a window sees nothing."""
    monkeypatch.setattr(triton_decode, "DECODE_MAX_PARTS", 2)
    lens = [(5 * 256 + 3, 1), (4 * 256 + 30, 1), (255, 1), (2, 1)]
    batch = create_paged_batch(lens, num_heads=2, num_kv_heads=1, sliding_window=sliding_window)
    assert_right(batch)
    for sequence, together in enumerate(batch.run()):
        assert torch.equal(batch.take(sequence).run()[0], together)


@pytest.mark.parametrize("sliding_window", [None, 9])
def test_a_sequence_alone_equals_the_sequence_in_a_crowd(sliding_window: int | None) -> None:
    batch = create_paged_batch([*LONG_DECODES, *MIXED], sliding_window=sliding_window)
    for sequence, together in enumerate(batch.run()):
        assert torch.equal(batch.take(sequence).run()[0], together)


def test_keys_before_the_window_are_never_read() -> None:
    batch = create_paged_batch([(50, 1), (40, 3)], sliding_window=8)
    expected = batch.expected()
    for key, value, last_unseen in zip(batch.keys, batch.values, (43, 33), strict=True):
        key[:last_unseen] = torch.nan  # as after their blocks' reuse by somebody else
        value[:last_unseen] = torch.nan
    for actual, wanted in zip(batch.run(), expected, strict=True):
        assert_close(actual, wanted, torch.float32)


def test_padded_decodes_get_zeros_and_change_nobody() -> None:
    """The layout that a CUDA graph is captured with."""
    batch = create_paged_batch([(5, 1), (300, 1)], num_heads=2, num_kv_heads=1)
    meta = batch.meta()
    cache = batch.cache(meta)
    q = torch.cat([*batch.queries, torch.full((2, 2, 32), torch.nan)])
    new_keys, new_values = (torch.cat([each[-1:] for each in side]) for side in (batch.keys, batch.values))
    padded = _pad_decodes(meta, 2)
    nowhere = torch.full((2, 1, 32), torch.inf)
    BACKEND.store_kv(torch.cat((new_keys, nowhere)), torch.cat((new_values, nowhere)), cache, padded.slot_mapping)
    assert not cache.key.isinf().any()
    assert not cache.value.isinf().any()
    for window in (None, 16):
        output = BACKEND.paged_attention(q, cache, padded, scale=batch.scale, sliding_window=window)
        alone = BACKEND.paged_attention(q[:2], cache, meta, scale=batch.scale, sliding_window=window)
        assert torch.equal(output[:2], alone)
        assert torch.equal(output[2:], torch.zeros(2, 2, 32))


def _pad_decodes(meta: AttentionMeta, count: int) -> AttentionMeta:
    def padded(tensor: Tensor, value: int) -> Tensor:
        return torch.cat((tensor, torch.full((count, *tensor.shape[1:]), value, dtype=tensor.dtype)))

    return replace(
        meta,
        query_start_loc=padded(meta.query_start_loc, int(meta.query_start_loc[-1])),
        seq_lens=padded(meta.seq_lens, 0),
        block_table=padded(meta.block_table, -1),
        slot_mapping=padded(meta.slot_mapping, -1),
        num_decodes=meta.num_decodes + count,
        max_seq_len=4096,  # the capacity
    )


def test_store_kv_writes_its_places_and_no_other() -> None:
    batch = create_paged_batch([(3, 1), (10, 8)])
    meta = batch.meta()
    cache = batch.cache(meta)
    before = cache.key.flatten(0, 1).clone()
    fused = torch.randn(9, 2 * 2 * 32)  # the views of a fused projection
    key, value = (half.view(9, 2, 32) for half in fused.chunk(2, dim=-1))
    BACKEND.store_kv(key, value, cache, meta.slot_mapping)
    assert torch.equal(cache.key.flatten(0, 1)[meta.slot_mapping], key)
    assert torch.equal(cache.value.flatten(0, 1)[meta.slot_mapping], value)
    untouched = torch.ones(len(before), dtype=torch.bool)
    untouched[meta.slot_mapping] = False
    torch.testing.assert_close(cache.key.flatten(0, 1)[untouched], before[untouched], equal_nan=True, rtol=0, atol=0)


def test_takes_queries_that_are_views_of_something_wider() -> None:
    batch = create_paged_batch([*MIXED])
    wide = [torch.cat((torch.full_like(q, torch.nan), q), dim=1) for q in batch.queries]
    meta = batch.meta()
    cache = batch.cache(meta)
    new_keys, new_values = (
        torch.cat([each[-new:] for each, new in zip(side, batch.query_lens, strict=True)])
        for side in (batch.keys, batch.values)
    )
    BACKEND.store_kv(new_keys, new_values, cache, meta.slot_mapping)
    output = BACKEND.paged_attention(torch.cat(wide)[:, 6:], cache, meta, scale=batch.scale, sliding_window=None)
    assert_close(output, torch.cat(batch.expected()), torch.float32)


def test_nan_of_one_sequence_stays_there() -> None:
    batch = create_paged_batch([(20, 1), (30, 1), (8, 4), (3, 9)])
    clean = batch.run()
    for sequence in (1, 2):
        batch.values[sequence][5] = torch.nan
    poisoned = batch.run()
    for sequence in (0, 3):
        assert torch.equal(poisoned[sequence], clean[sequence])
    for sequence in (1, 2):
        assert poisoned[sequence].isnan().all()


@pytest.mark.parametrize("sliding_window", [None, 4])
@pytest.mark.parametrize("context", [0, 40])
def test_nan_of_one_token_reaches_only_the_queries_that_see_it(context: int, sliding_window: int | None) -> None:
    batch = create_paged_batch([(context, 21)], sliding_window=sliding_window)
    clean = batch.run()[0]
    batch.keys[0][context + 9], batch.values[0][context + 9] = torch.nan, torch.inf
    sees = slice(9, 21 if sliding_window is None else 13)
    poisoned = batch.run()[0]
    assert poisoned[sees].isnan().all()
    others = [row for row in range(21) if row not in range(21)[sees]]
    assert torch.equal(poisoned[others], clean[others])


def test_padding_is_transformed_but_not_stored() -> None:
    transform = create_transform(32, torch.float32, has_norm=True, has_rope=True)
    qkv = torch.randn(len(SLOTS), (6 + 2 * 2) * 32)
    wanted, cache = create_cache(2, 32, torch.float32), create_cache(2, 32, torch.float32)
    q = BACKEND.norm_rotary_store(qkv, transform, wanted, torch.tensor(SLOTS))
    padded = torch.tensor([*SLOTS[:3], -1, -1])
    qkv[3:] = torch.nan
    assert torch.equal(BACKEND.norm_rotary_store(qkv, transform, cache, padded)[:3], q[:3])
    for pool, full in ((cache.key, wanted.key), (cache.value, wanted.value)):
        pool, full = pool.flatten(0, 1), full.flatten(0, 1)
        assert torch.equal(pool[list(SLOTS[:3])], full[list(SLOTS[:3])])
        assert pool[list(SLOTS[3:])].isnan().all()


def test_one_launch_does_what_its_steps_do() -> None:
    """Rotation alone has the same bits; the mean of a norm may be summed in another order."""
    transform = create_transform(64, torch.bfloat16, has_norm=False, has_rope=True)
    qkv = torch.randn(len(SLOTS), (9 + 2 * 3) * 64).bfloat16()
    fused, stepwise = create_cache(3, 64, torch.bfloat16), create_cache(3, 64, torch.bfloat16)
    slots = torch.tensor(SLOTS)
    q = BACKEND.norm_rotary_store(qkv, transform, fused, slots)
    assert torch.equal(q, composed.norm_rotary_store(BACKEND, qkv, transform, stepwise, slots))
    for one, other in ((fused.key, stepwise.key), (fused.value, stepwise.value)):
        assert torch.equal(one.flatten(0, 1)[slots], other.flatten(0, 1)[slots])
