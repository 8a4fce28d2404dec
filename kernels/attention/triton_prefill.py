"""Paged attention for sequences with several query tokens: whole prompts, and chunks of one over a longer context."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.attention.triton_softmax import attend, nothing_seen, quotient
from loraplex.kernels.triton_configs import prefill_config


def attend_prefills(
    q: Tensor,
    output: Tensor,
    cache: KVCache,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None,
    architecture: int,
) -> None:
    """Fill `output [T, heads, head_dim]` for the sequences after the first `meta.num_decodes`."""
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = cache.key.shape[1:3]
    config = prefill_config(architecture, itemsize=q.element_size(), head_dim=head_dim)
    block_g = triton.next_power_of_2(num_heads // num_kv_heads)
    block_m = max(config.block_m, block_g)
    num_tiles = triton.cdiv(meta.max_query_len, block_m // block_g)
    prefill_kernel[(num_tiles, num_kv_heads, meta.num_seqs - meta.num_decodes)](
        q,
        cache.key,
        cache.value,
        output,
        meta.block_table,
        meta.query_start_loc,
        meta.seq_lens,
        meta.num_decodes,
        scale * math.log2(math.e),
        q.stride()[:2],
        output.stride()[:2],
        cache.key.stride()[:3],
        meta.block_table.stride(0),
        WINDOW=sliding_window or 0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=block_g,
        BLOCK_M=block_m,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@triton.jit(do_not_specialize=["first_sequence", "stride_table"])
def prefill_kernel(
    q: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    output: tl.tensor,
    block_table: tl.tensor,
    query_start_loc: tl.tensor,
    seq_lens: tl.tensor,
    first_sequence: int,
    scale_log2e: float,
    q_strides: tl.tuple,
    output_strides: tl.tuple,
    cache_strides: tl.tuple,
    stride_table: int,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One tile of query tokens of one sequence, with the query heads of one key head: BLOCK_M / BLOCK_G tokens.

    Semantics: for the query i of sequence s, at position seq_lens[s] - query_len(s) + i, output[start(s) + i, h] =
    softmax over the keys j it sees of (scale * q[start(s) + i, h] . key[j]) applied to value[j].

    Shape:
        q, output: [num_tokens, heads, HEAD_DIM]. query_start_loc: int32 [num_seqs + 1]. Others as in `decode_kernel`.
    """
    sequence = first_sequence + tl.program_id(2).to(tl.int64)
    begin = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - begin
    tile_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * (BLOCK_M // BLOCK_G)  # who sees most keys starts first
    if tile_start >= query_len:
        return
    length = tl.load(seq_lens + sequence)
    query = tile_start + tl.arange(0, BLOCK_M) // BLOCK_G
    member = tl.arange(0, BLOCK_M) % BLOCK_G
    token, head = (begin + query).to(tl.int64), tl.program_id(1) * GROUP + member
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_used = ((query < query_len) & (member < GROUP))[:, None] & (dim < HEAD_DIM)
    result = _attend_to_tile(
        tl.load((q + token * q_strides[0] + head * q_strides[1])[:, None] + dim, mask=is_used, other=0.0),
        length - query_len + query,
        length - query_len + tile_start,
        length,
        (key + tl.program_id(1) * cache_strides[2], value + tl.program_id(1) * cache_strides[2]),
        block_table + sequence * stride_table,
        scale_log2e,
        cache_strides,
        WINDOW,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
        BLOCK_M // BLOCK_G,
    )
    rows = output + token * output_strides[0] + head * output_strides[1]
    tl.store(rows[:, None] + dim, result.to(output.dtype.element_ty), mask=is_used)


@triton.jit
def _attend_to_tile(
    queries: tl.tensor,
    position: tl.tensor,
    first_position: int,
    length: int,
    kv: tl.tuple,
    table_row: tl.tensor,
    scale_log2e: float,
    cache_strides: tl.tuple,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
) -> tl.tensor:
    """float32, as `queries`: see `attend`. The tile's NUM_TOKENS positions begin with `first_position`."""
    state = nothing_seen(queries.shape[0], queries.shape[1])
    last = tl.minimum(first_position + NUM_TOKENS, length)
    bounds = _bounds(first_position, last, WINDOW, BLOCK_N)
    for stretch in tl.static_range(0 if WINDOW > 0 else 1, 3):
        state = attend(
            queries,
            position,
            state,
            bounds[stretch],
            bounds[stretch + 1],
            kv,
            table_row,
            scale_log2e,
            cache_strides,
            HEAD_DIM,
            BLOCK_SIZE,
            BLOCK_N,
            stretch != 1,
            WINDOW,
        )
    return quotient(state[0], state[1][:, None])


@triton.jit
def _bounds(
    first_position: int, last: int, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Cuts the keys that any query of positions `first_position` to `last` (excluded) sees into three stretches.

    The middle one, in whole blocks, is seen by all of them and needs no mask. The first is empty without a window.
    """
    begin = 0
    left = 0
    if WINDOW > 0:
        begin = tl.maximum(first_position + 1 - WINDOW, 0)
        left = tl.minimum(begin + tl.cdiv(tl.maximum(last - WINDOW, 0) - begin, BLOCK_N) * BLOCK_N, last)
    right = left + tl.maximum(first_position + 1 - left, 0) // BLOCK_N * BLOCK_N
    return begin, left, right, last
