"""Paged attention for sequences with several query tokens: whole prompts, and chunks of one over a longer context."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.attention.triton_softmax import attend, quotient
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
        *q.stride()[:2],
        *output.stride()[:2],
        *cache.key.stride()[:3],
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
    stride_q_token: int,
    stride_q_head: int,
    stride_output_token: int,
    stride_output_head: int,
    stride_block: int,
    stride_offset: int,
    stride_kv_head: int,
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

    Semantics: for the query i of sequence s, at position seq_lens[s] - query_len(s) + i,
    output[start(s) + i, h] = softmax over the keys j it sees of (scale * q[start(s) + i, h] . key[j]) applied to
    value[j].

    Shape:
        q, output: [num_tokens, heads, HEAD_DIM]; heads = kv_heads * GROUP.
        key, value: [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM].
        block_table: int32 [num_seqs, max_blocks].
        query_start_loc: int32 [num_seqs + 1].
        seq_lens: int32 [num_seqs].
    """
    sequence = first_sequence + tl.program_id(2)
    begin = tl.load(query_start_loc + sequence)
    query_len = tl.load(query_start_loc + sequence + 1) - begin
    # The last tiles see most keys: they start first.
    tile_start = (tl.num_programs(0) - 1 - tl.program_id(0)) * (BLOCK_M // BLOCK_G)
    if tile_start >= query_len:
        return
    kv_head = tl.program_id(1)
    length = tl.load(seq_lens + sequence)
    context_len = length - query_len
    lane = tl.arange(0, BLOCK_M)
    query = tile_start + lane // BLOCK_G
    head = kv_head * GROUP + lane % BLOCK_G
    dim = tl.arange(0, BLOCK_D)
    is_row = (query < query_len) & (lane % BLOCK_G < GROUP)
    is_used = is_row[:, None] & (dim < HEAD_DIM)[None, :]
    token = (begin + query).to(tl.int64)
    q_rows = q + token * stride_q_token + head * stride_q_head
    queries = tl.load(q_rows[:, None] + dim[None, :], mask=is_used, other=0.0)
    position = context_len + query
    numerator = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    denominator = tl.zeros((BLOCK_M,), dtype=tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    # Keys that all queries of the tile see need no mask: whole blocks of them first, then the rest.
    first = 0
    unmasked = (context_len + tile_start + 1) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        first = tl.maximum(context_len + tile_start + 1 - WINDOW, 0)
        unmasked = first
    for masked in tl.static_range(2):
        numerator, denominator, largest = attend(
            queries,
            position,
            numerator,
            denominator,
            largest,
            unmasked if masked else first,
            tl.minimum(context_len + tile_start + BLOCK_M // BLOCK_G, length) if masked else unmasked,
            key + kv_head * stride_kv_head,
            value + kv_head * stride_kv_head,
            block_table + sequence.to(tl.int64) * stride_table,
            scale_log2e,
            stride_block,
            stride_offset,
            MASKED=masked == 1,
            WINDOW=WINDOW,
            HEAD_DIM=HEAD_DIM,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_D=BLOCK_D,
            BLOCK_N=BLOCK_N,
        )
    result = quotient(numerator, denominator[:, None]).to(output.dtype.element_ty)
    place = (output + token * stride_output_token + head * stride_output_head)[:, None] + dim[None, :]
    tl.store(place, result, mask=is_used)
