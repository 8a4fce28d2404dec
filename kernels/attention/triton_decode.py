"""Paged attention for sequences with one query token: the keys are split over programs, then the parts are merged.

The split is by partitions of a fixed number of keys, not into a fixed number of parts, so a row's result does not
depend on the lengths of the others.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.attention.triton_softmax import attend, quotient
from loraplex.kernels.triton_configs import decode_config

_BLOCK_PARTS = 16


def attend_decodes(
    q: Tensor,
    output: Tensor,
    cache: KVCache,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None,
    architecture: int,
) -> None:
    """Fill `output [T, heads, head_dim]` for the first `meta.num_decodes` sequences, which are its first rows.

    A sequence of length 0 (the padding of a captured batch) gets zeros.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = cache.key.shape[1:3]
    config = decode_config(architecture, itemsize=q.element_size(), head_dim=head_dim)
    num_parts = max(1, triton.cdiv(meta.max_seq_len, config.partition))
    shape = (meta.num_decodes, num_heads, num_parts)
    part_output = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    window = sliding_window or 0
    decode_kernel[(meta.num_decodes, num_kv_heads, num_parts)](
        q,
        cache.key,
        cache.value,
        meta.block_table,
        meta.seq_lens,
        part_output,
        part_lse,
        scale * math.log2(math.e),
        *q.stride()[:2],
        *cache.key.stride()[:3],
        meta.block_table.stride(0),
        WINDOW=window,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=triton.next_power_of_2(num_heads // num_kv_heads),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        PARTITION=config.partition,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_kernel[(meta.num_decodes, num_heads)](
        part_output,
        part_lse,
        meta.seq_lens,
        output,
        num_parts,
        *output.stride()[:2],
        WINDOW=window,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=_BLOCK_PARTS,
        PARTITION=config.partition,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    q: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    block_table: tl.tensor,
    seq_lens: tl.tensor,
    part_output: tl.tensor,
    part_lse: tl.tensor,
    scale_log2e: float,
    stride_q_token: int,
    stride_q_head: int,
    stride_block: int,
    stride_offset: int,
    stride_kv_head: int,
    stride_table: int,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    """One sequence, the query heads of one key head, one partition of the keys.

    Semantics: part_output[s, h, p] = softmax over the seen keys j of partition p of (scale * q[s, h] . key[j])
    applied to value[j]; part_lse[s, h, p] = log2 of the sum over them of exp(scale * q[s, h] . key[j]). Partitions
    of which nothing is seen are not written.

    Shape:
        q: [num_seqs, heads, HEAD_DIM]; heads = kv_heads * GROUP.
        key, value: [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM].
        block_table: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], 0 = padding.
        part_output: float32 [num_seqs, heads, partitions, HEAD_DIM], contiguous.
        part_lse: float32 [num_seqs, heads, partitions], contiguous.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(seq_lens + sequence)
    first = part * PARTITION
    last = tl.minimum(first + PARTITION, length)
    if WINDOW > 0:
        first = tl.maximum(first, length - WINDOW)
    if first >= last:
        return
    member = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_D)
    is_used = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q_row = q + sequence.to(tl.int64) * stride_q_token + head * stride_q_head
    queries = tl.load(q_row[:, None] + dim[None, :], mask=is_used, other=0.0)
    numerator, denominator, largest = attend(
        queries,
        member,
        tl.zeros((BLOCK_G, BLOCK_D), dtype=tl.float32),
        tl.zeros((BLOCK_G,), dtype=tl.float32),
        tl.full((BLOCK_G,), float("-inf"), dtype=tl.float32),
        first,
        last,
        key + kv_head * stride_kv_head,
        value + kv_head * stride_kv_head,
        block_table + sequence.to(tl.int64) * stride_table,
        scale_log2e,
        stride_block,
        stride_offset,
        MASKED=False,
        WINDOW=0,
        HEAD_DIM=HEAD_DIM,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_D=BLOCK_D,
        BLOCK_N=BLOCK_N,
    )
    num_heads = tl.num_programs(1) * GROUP
    place = (sequence.to(tl.int64) * num_heads + head) * tl.num_programs(2) + part
    result = quotient(numerator, denominator[:, None])
    tl.store(part_output + place[:, None] * HEAD_DIM + dim[None, :], result, mask=is_used)
    tl.store(part_lse + place, largest + tl.log2(denominator), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    part_output: tl.tensor,
    part_lse: tl.tensor,
    seq_lens: tl.tensor,
    output: tl.tensor,
    num_parts: int,
    stride_token: int,
    stride_head: int,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PARTITION: tl.constexpr,
) -> None:
    """One sequence, one head: weigh its parts by their share of the softmax.

    Semantics: output[s, h] = sum over p of 2**part_lse[s, h, p] * part_output[s, h, p] / sum over p of
    2**part_lse[s, h, p], over the partitions that `decode_kernel` has written; 0 if there are none.

    Shape:
        part_output, part_lse, seq_lens: as in `decode_kernel`, with num_parts partitions.
        output: [num_seqs, heads, HEAD_DIM].
    """
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(seq_lens + sequence)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(length - WINDOW, 0) // PARTITION
    row = (sequence.to(tl.int64) * tl.num_programs(1) + head) * num_parts
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    numerator = tl.zeros((BLOCK_D,), dtype=tl.float32)
    denominator = tl.zeros((1,), dtype=tl.float32)
    largest = tl.full((1,), float("-inf"), dtype=tl.float32)
    for first in range(begin, tl.cdiv(length, PARTITION), BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        is_part = part < tl.cdiv(length, PARTITION)
        lse = tl.load(part_lse + row + part, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        share = tl.exp2(lse - new_largest)
        kept = tl.exp2(largest - new_largest)
        place = part_output + (row + part)[:, None] * HEAD_DIM + dim[None, :]
        parts = tl.load(place, mask=is_part[:, None] & is_dim[None, :], other=0.0)
        numerator = numerator * kept + tl.sum(parts * share[:, None], 0)
        denominator = denominator * kept + tl.sum(share, 0)
        largest = new_largest
    result = quotient(numerator, denominator)
    place = output + sequence.to(tl.int64) * stride_token + head * stride_head + dim
    tl.store(place, result.to(output.dtype.element_ty), mask=is_dim)
