"""Paged attention for sequences with one query token: the keys are split over programs, then the parts are merged.

A part is a partition of a fixed number of keys, or several beside each other where a row would have too many parts. So
the parts of a row follow from its own length: its result does not depend on the lengths of the others, and neither
grid nor scratch grow with the longest context without bound.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.attention.triton_softmax import attend, nothing_seen, quotient
from loraplex.kernels.triton_configs import DECODE_MAX_PARTS, decode_config

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
    num_parts = min(max(1, triton.cdiv(meta.max_seq_len, config.partition)), DECODE_MAX_PARTS)
    shape = (meta.num_decodes, num_heads, num_parts)
    part_output = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    decode_kernel[(meta.num_decodes, num_kv_heads, num_parts)](
        q,
        cache.key,
        cache.value,
        meta.block_table,
        meta.seq_lens,
        part_output,
        part_lse,
        scale * math.log2(math.e),
        q.stride()[:2],
        cache.key.stride()[:3],
        meta.block_table.stride(0),
        WINDOW=sliding_window or 0,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_G=triton.next_power_of_2(num_heads // num_kv_heads),
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        BLOCK_N=config.block_n,
        PARTITION=config.partition,
        MAX_PARTS=DECODE_MAX_PARTS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge_kernel[(meta.num_decodes, num_heads)](
        part_output,
        part_lse,
        meta.seq_lens,
        output,
        num_parts,
        output.stride()[:2],
        WINDOW=sliding_window or 0,
        HEAD_DIM=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=_BLOCK_PARTS,
        PARTITION=config.partition,
        MAX_PARTS=DECODE_MAX_PARTS,
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
    q_strides: tl.tuple,
    cache_strides: tl.tuple,
    stride_table: int,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTITION: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """One sequence s, the query heads of one key head, one part p of the keys, unless nothing of it is seen.

    Semantics: part_output[s, h, p] = softmax over the seen keys j of (scale * q[s, h] . key[j]) applied to value[j];
    part_lse[s, h, p] = log2 of the sum over them of exp(scale * q[s, h] . key[j]).

    Shape:
        q: [num_seqs, kv_heads * GROUP, HEAD_DIM]. key, value: [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM].
        block_table: int32 [num_seqs, max_blocks]. seq_lens: int32 [num_seqs], 0 = padding.
        part_output: float32 [num_seqs, heads, parts, HEAD_DIM]. part_lse: float32 [num_seqs, heads, parts].
    """
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    size = _part_size(length, PARTITION, MAX_PARTS)
    first = tl.maximum(tl.program_id(2) * size, _first_seen(length, WINDOW))
    last = tl.minimum((tl.program_id(2) + 1) * size, length)
    if first >= last:
        return
    member = tl.arange(0, BLOCK_G)
    head = tl.program_id(1) * GROUP + member
    dim = tl.arange(0, BLOCK_D)
    is_used = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    numerator, denominator, largest = attend(
        tl.load((q + sequence * q_strides[0] + head * q_strides[1])[:, None] + dim[None, :], mask=is_used, other=0.0),
        member,
        nothing_seen(BLOCK_G, BLOCK_D),
        first,
        last,
        (key + tl.program_id(1) * cache_strides[2], value + tl.program_id(1) * cache_strides[2]),
        block_table + sequence * stride_table,
        scale_log2e,
        cache_strides,
        HEAD_DIM,
        BLOCK_SIZE,
        BLOCK_N,
    )
    place = (sequence * (tl.num_programs(1) * GROUP) + head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(part_output + place[:, None] * HEAD_DIM + dim[None, :], quotient(numerator, denominator[:, None]), is_used)
    tl.store(part_lse + place, largest + tl.log2(denominator), mask=member < GROUP)


@triton.jit(do_not_specialize=["num_parts"])
def merge_kernel(
    part_output: tl.tensor,
    part_lse: tl.tensor,
    seq_lens: tl.tensor,
    output: tl.tensor,
    num_parts: int,
    output_strides: tl.tuple,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PARTITION: tl.constexpr,
    MAX_PARTS: tl.constexpr,
) -> None:
    """One sequence, one head: weigh its parts by their share of the softmax.

    Semantics: output[s, h] = sum over p of 2**part_lse[s, h, p] * part_output[s, h, p] / sum over p of
    2**part_lse[s, h, p], over the parts that `decode_kernel` has written; 0 if there are none.

    Shape:
        part_output, part_lse, seq_lens: as in `decode_kernel`, with num_parts parts.
        output: [num_seqs, heads, HEAD_DIM].
    """
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(seq_lens + sequence)
    size = _part_size(length, PARTITION, MAX_PARTS)
    row = (sequence * tl.num_programs(1) + tl.program_id(1)) * num_parts
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    numerator = tl.zeros((BLOCK_D,), dtype=tl.float32)
    denominator = tl.zeros((1,), dtype=tl.float32)
    largest = tl.full((1,), float("-inf"), dtype=tl.float32)
    for first in range(_first_seen(length, WINDOW) // size, tl.cdiv(length, size), BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)
        is_part = part < tl.cdiv(length, size)
        lse = tl.load(part_lse + row + part, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        share = tl.exp2(lse - new_largest)
        kept = tl.exp2(largest - new_largest)
        place = part_output + (row + part)[:, None] * HEAD_DIM + dim[None, :]
        parts = tl.load(place, mask=is_part[:, None] & is_dim[None, :], other=0.0)
        numerator = numerator * kept + tl.sum(parts * share[:, None], 0)
        denominator = denominator * kept + tl.sum(share, 0)
        largest = new_largest
    place = output + sequence * output_strides[0] + tl.program_id(1) * output_strides[1] + dim
    tl.store(place, quotient(numerator, denominator).to(output.dtype.element_ty), mask=is_dim)


@triton.jit
def _part_size(length: int, PARTITION: tl.constexpr, MAX_PARTS: tl.constexpr) -> tl.tensor:
    """Keys of a part: one partition, or as many as it takes to have MAX_PARTS parts at most."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, PARTITION), MAX_PARTS), 1) * PARTITION


@triton.jit
def _first_seen(length: int, WINDOW: tl.constexpr) -> tl.tensor:
    return tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
