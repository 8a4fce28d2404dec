"""The two kernels of LoRA over slot tables; `kernels/lora/triton.py` says how they work together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_width", "num_rows"])
def shrink_kernel(
    x: tl.tensor,
    lora_a_0: tl.tensor,
    lora_a_1: tl.tensor,
    lora_a_2: tl.tensor,
    partials: tl.tensor,
    token_order: tl.tensor,
    chunk_selection: tl.tensor,
    chunk_start: tl.tensor,
    chunk_len: tl.tensor,
    slot_table: tl.tensor,
    table_width: int,
    in_features: int,
    num_rows: int,
    stride_x: int,
    stride_a: int,
    SLOT_RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One chunk, one tile of rank rows, one split of the features of one slice.

    Semantics: partials[p, s, i, r] = sum over features f of split s of A_p[row(i, r), f] * x[token_order[i], f],
    where row(i, r) = slot_table[selection(i), r // SLOT_RANK] * SLOT_RANK + r % SLOT_RANK; ranks r that the selection
    lacks are not written.

    Shape:
        x: [num_tokens, in_features], rows `stride_x` apart.
        lora_a_p: [num_slots * SLOT_RANK, in_features], rows `stride_a` apart; one of each slice.
        partials: float32 [slices, NUM_SPLITS, num_rows, tiles * BLOCK_R], contiguous.
        token_order: int64 [num_rows].
        chunk_selection, chunk_start, chunk_len: int32 [chunks]; selection -1 = nothing to do.
        slot_table: int32 [num_selections, table_width], -1 ends a row.
    """
    selection = tl.load(chunk_selection + tl.program_id(0))
    if selection < 0:
        return
    piece = tl.program_id(2) // NUM_SPLITS
    split = tl.program_id(2) % NUM_SPLITS
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = _slot_of_rank(slot_table, selection, rank, table_width, SLOT_RANK)
    if tl.max(slot, 0) < 0:
        return
    has_rank = slot >= 0
    row, has_row = _chunk_rows(chunk_start, chunk_len, BLOCK_M)
    token = tl.load(token_order + row, mask=has_row, other=0)
    lora_a = tl.where(piece == 0, lora_a_0, tl.where(piece == 1, lora_a_1, lora_a_2))
    a_rows = lora_a + (slot.to(tl.int64) * SLOT_RANK + rank % SLOT_RANK) * stride_a
    x_rows = x + token * stride_x

    split_size = tl.cdiv(tl.cdiv(in_features, NUM_SPLITS), BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for first in range(split * split_size, tl.minimum((split + 1) * split_size, in_features), BLOCK_K):
        feature = first + tl.arange(0, BLOCK_K)
        is_feature = feature < in_features
        x_tile = tl.load(x_rows[:, None] + feature[None, :], mask=has_row[:, None] & is_feature[None, :], other=0.0)
        a_tile = tl.load(a_rows[None, :] + feature[:, None], mask=has_rank[None, :] & is_feature[:, None], other=0.0)
        if x_tile.dtype != a_tile.dtype:
            x_tile = x_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        total = tl.dot(x_tile, a_tile, total, input_precision="tf32x3")
    width = tl.num_programs(1) * BLOCK_R
    place = partials + ((piece * NUM_SPLITS + split).to(tl.int64) * num_rows + row[:, None]) * width + rank[None, :]
    tl.store(place, total, mask=has_row[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["table_width", "num_rows", "stride_scaling"])
def expand_kernel(
    partials: tl.tensor,
    lora_b_0: tl.tensor,
    lora_b_1: tl.tensor,
    lora_b_2: tl.tensor,
    y: tl.tensor,
    scaling: tl.tensor,
    token_order: tl.tensor,
    chunk_selection: tl.tensor,
    chunk_start: tl.tensor,
    chunk_len: tl.tensor,
    slot_table: tl.tensor,
    slot_weight: tl.tensor,
    table_width: int,
    width_0: int,
    width_1: int,
    width_2: int,
    stride_b_0: int,
    stride_b_1: int,
    stride_b_2: int,
    num_rows: int,
    max_rank: int,
    stride_y: int,
    stride_scaling: int,
    SLOT_RANK: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One chunk, one tile of output columns of one slice. Every element of y is written by one program, once.

    Semantics: y[token_order[i], offset_p + n] += sum over ranks r of
    weight(i, r) * scaling[p, slot(i, r)] * (sum over s of partials[p, s, i, r]) * B_p[row(i, r), n],
    with slot and row as in `shrink_kernel`, weight likewise from `slot_weight`, summed in float32, rounded once.

    Shape:
        partials: float32 [slices, NUM_SPLITS, num_rows, max_rank], contiguous.
        lora_b_p: [num_slots * SLOT_RANK, width_p], rows `stride_b_p` apart; one of each slice.
        y: [num_tokens, sum of width_p], rows `stride_y` apart; changed in place.
        scaling: float32 [slices, num_slots], rows `stride_scaling` apart.
        slot_weight: float32 [num_selections, table_width].
        The others as in `shrink_kernel`.
    """
    selection = tl.load(chunk_selection + tl.program_id(0))
    if selection < 0:
        return
    piece = tl.program_id(2)
    width = tl.where(piece == 0, width_0, tl.where(piece == 1, width_1, width_2))
    if tl.program_id(1) * BLOCK_N >= width:
        return
    num_slots = _count_slots(slot_table, selection, table_width)
    if num_slots == 0:  # adding zero would turn -0.0 into 0.0
        return
    offset = tl.where(piece == 0, 0, tl.where(piece == 1, width_0, width_0 + width_1))
    lora_b = tl.where(piece == 0, lora_b_0, tl.where(piece == 1, lora_b_1, lora_b_2))
    stride_b = tl.where(piece == 0, stride_b_0, tl.where(piece == 1, stride_b_1, stride_b_2))
    row, has_row = _chunk_rows(chunk_start, chunk_len, BLOCK_M)
    token = tl.load(token_order + row, mask=has_row, other=0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < width

    delta = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for tile in range(0, tl.cdiv(num_slots * SLOT_RANK, BLOCK_R)):
        rank = tile * BLOCK_R + tl.arange(0, BLOCK_R)
        slot = _slot_of_rank(slot_table, selection, rank, table_width, SLOT_RANK)
        has_rank = slot >= 0
        shrunk = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for split in tl.static_range(NUM_SPLITS):
            first = (piece * NUM_SPLITS + split).to(tl.int64) * num_rows
            place = partials + (first + row[:, None]) * max_rank + rank[None, :]
            shrunk += tl.load(place, mask=has_row[:, None] & has_rank[None, :], other=0.0)
        weight = tl.load(slot_weight + selection * table_width + rank // SLOT_RANK, mask=has_rank, other=0.0)
        shrunk *= (weight * tl.load(scaling + piece * stride_scaling + slot, mask=has_rank, other=0.0))[None, :]
        b_rows = lora_b + (slot.to(tl.int64) * SLOT_RANK + rank % SLOT_RANK) * stride_b
        b_tile = tl.load(b_rows[:, None] + column[None, :], mask=has_rank[:, None] & is_column[None, :], other=0.0)
        if y.dtype.element_ty == tl.float32:
            b_tile = b_tile.to(tl.float32)
        delta = _dot_unrounded(shrunk, b_tile, delta)

    place = y + token[:, None] * stride_y + offset + column[None, :]
    mask = has_row[:, None] & is_column[None, :]
    base = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (base + delta).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _chunk_rows(chunk_start: tl.tensor, chunk_len: tl.tensor, BLOCK_M: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The chunk's places in `token_order`, and which of them it has."""
    member = tl.arange(0, BLOCK_M)
    return tl.load(chunk_start + tl.program_id(0)) + member, member < tl.load(chunk_len + tl.program_id(0))


@triton.jit
def _slot_of_rank(
    slot_table: tl.tensor, selection: int, rank: tl.tensor, table_width: int, SLOT_RANK: tl.constexpr
) -> tl.tensor:
    """The slot that holds each rank row of the selection, -1 past its last."""
    place = rank // SLOT_RANK
    return tl.load(slot_table + selection * table_width + place, mask=place < table_width, other=-1)


@triton.jit
def _count_slots(slot_table: tl.tensor, selection: int, table_width: int) -> int:
    count = 0
    for first in range(0, table_width, 64):
        place = first + tl.arange(0, 64)
        slot = tl.load(slot_table + selection * table_width + place, mask=place < table_width, other=-1)
        count += tl.sum((slot >= 0).to(tl.int32), 0)
    return count


@triton.jit
def _dot_unrounded(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """`total + a @ b` with float32 `a`: on 16-bit `b` it is taken in two parts, which keep 16 bits of it or more."""
    if b.dtype == tl.float32:
        return tl.dot(a, b, total, input_precision="tf32x3")
    high = a.to(b.dtype)
    low = (a - high.to(tl.float32)).to(b.dtype)
    return tl.dot(low, b, tl.dot(high, b, total))
