"""The two kernels of LoRA over slot tables; `kernels/lora/triton.py` says how they work together.

What belongs to a slice (q, k and v; gate and up) comes as a tuple of three; a program takes its own by `_pick`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_width", "num_rows", "num_splits", "splits_of_program"])
def shrink_kernel(
    x: tl.tensor,
    lora_a: tl.tuple,
    partials: tl.tensor,
    token_order: tl.tensor,
    chunk_selection: tl.tensor,
    chunk_start: tl.tensor,
    chunk_len: tl.tensor,
    slot_table: tl.tensor,
    table_width: int,
    in_features: int,
    num_rows: int,
    num_splits: int,
    splits_of_program: int,
    stride_x: int,
    stride_a: int,
    SLOT_RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One chunk, one tile of rank rows, one or all splits of the features of one slice.

    Semantics: partials[p, s, i, r] = sum over features f of split s of A_p[row(i, r), f] * x[token_order[i], f],
    where row(i, r) = slot_table[selection(i), r // SLOT_RANK] * SLOT_RANK + r % SLOT_RANK; ranks r that the selection
    lacks are not written. With all splits in one program these sums are added up in the order of s, from zero.

    Shape:
        x: [num_tokens, in_features], rows `stride_x` apart.
        lora_a: each [num_slots * SLOT_RANK, in_features], rows `stride_a` apart.
        partials: float32 [slices, num_splits / splits_of_program, num_rows, tiles * BLOCK_R], contiguous.
        token_order: int64 [num_rows].
        chunk_selection, chunk_start, chunk_len: int32 [chunks]; selection -1 = nothing to do.
        slot_table: int32 [num_selections, table_width], -1 ends a row.
    """
    selection = tl.load(chunk_selection + tl.program_id(0))
    if selection < 0:
        return
    rank = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = _slot_of_rank(slot_table, selection, rank, table_width, SLOT_RANK)
    if tl.max(slot, 0) < 0:
        return
    num_parts = num_splits // splits_of_program
    piece = tl.program_id(2) // num_parts
    first_split = tl.program_id(2) % num_parts * splits_of_program
    has_rank = slot >= 0
    row, has_row = _chunk_rows(chunk_start, chunk_len, BLOCK_M)
    x_rows = x + tl.load(token_order + row, mask=has_row, other=0) * stride_x
    a_rows = _pick(lora_a, piece) + (slot.to(tl.int64) * SLOT_RANK + rank % SLOT_RANK) * stride_a

    split_size = tl.cdiv(tl.cdiv(in_features, num_splits), BLOCK_K) * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for split in range(first_split, first_split + splits_of_program):
        end = tl.minimum((split + 1) * split_size, in_features)
        total += _shrink_features(x_rows, a_rows, has_row, has_rank, split * split_size, end, BLOCK_K)
    place = (tl.program_id(2).to(tl.int64) * num_rows + row[:, None]) * (tl.num_programs(1) * BLOCK_R) + rank[None, :]
    tl.store(partials + place, total, mask=has_row[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["table_width", "num_rows", "num_parts", "stride_scaling"])
def expand_kernel(
    partials: tl.tensor,
    lora_b: tl.tuple,
    y: tl.tensor,
    scaling: tl.tensor,
    token_order: tl.tensor,
    chunk_selection: tl.tensor,
    chunk_start: tl.tensor,
    chunk_len: tl.tensor,
    slot_table: tl.tensor,
    slot_weight: tl.tensor,
    table_width: int,
    widths: tl.tuple,
    strides_b: tl.tuple,
    num_rows: int,
    num_parts: int,
    max_rank: int,
    stride_y: int,
    stride_scaling: int,
    SLOT_RANK: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
) -> None:
    """One chunk, one tile of output columns of one slice. Every element of y is written by one program, once.

    Semantics: y[token_order[i], offset_p + n] += sum over ranks r of
    weight(i, r) * scaling[p, slot(i, r)] * (sum over s of partials[p, s, i, r]) * B_p[row(i, r), n],
    with slot and row as in `shrink_kernel`, weight likewise from `slot_weight`, summed in float32, rounded once.

    Shape:
        partials: float32 [slices, num_parts, num_rows, max_rank], contiguous; at most MAX_PARTS.
        lora_b: each [num_slots * SLOT_RANK, widths[p]], rows `strides_b[p]` apart.
        y: [num_tokens, sum of widths], rows `stride_y` apart; changed in place.
        scaling: float32 [slices, num_slots], rows `stride_scaling` apart.
        slot_weight: float32 [num_selections, table_width]. The others as in `shrink_kernel`.
    """
    selection = tl.load(chunk_selection + tl.program_id(0))
    piece = tl.program_id(2)
    num_slots = _count_slots(slot_table, selection, table_width)
    if (num_slots == 0) | (tl.program_id(1) * BLOCK_N >= _pick(widths, piece)):
        return  # adding zero would turn -0.0 into 0.0
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < _pick(widths, piece)
    row, has_row = _chunk_rows(chunk_start, chunk_len, BLOCK_M)
    parts = partials + (piece.to(tl.int64) * num_parts * num_rows + row) * max_rank
    delta = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, num_slots * SLOT_RANK, BLOCK_R):
        rank = first + tl.arange(0, BLOCK_R)
        slot = _slot_of_rank(slot_table, selection, rank, table_width, SLOT_RANK)
        shrunk = _sum_parts(parts, has_row, rank, slot >= 0, num_parts, num_rows, max_rank, MAX_PARTS)
        weight = tl.load(slot_weight + selection * table_width + rank // SLOT_RANK, mask=slot >= 0, other=0.0)
        factor = weight * tl.load(scaling + piece * stride_scaling + slot, mask=slot >= 0, other=0.0)
        b_rows = _pick(lora_b, piece) + (slot.to(tl.int64) * SLOT_RANK + rank % SLOT_RANK) * _pick(strides_b, piece)
        b_tile = tl.load(b_rows[:, None] + column[None, :], mask=(slot >= 0)[:, None] & is_column[None, :], other=0.0)
        delta = _dot_unrounded(shrunk * factor[None, :], b_tile, delta, y.dtype.element_ty)
    column += tl.where(piece == 0, 0, tl.where(piece == 1, widths[0], widths[0] + widths[1]))
    y_rows = y + tl.load(token_order + row, mask=has_row, other=0) * stride_y
    _add_rounded_once(y_rows[:, None] + column[None, :], delta, has_row, is_column)


@triton.jit
def _pick(values: tl.tuple, piece: int) -> tl.tensor:
    return tl.where(piece == 0, values[0], tl.where(piece == 1, values[1], values[2]))


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
    """None for selection -1."""
    count = 0
    for first in range(0, table_width, 64):
        place = first + tl.arange(0, 64)
        mask = (place < table_width) & (selection >= 0)
        slot = tl.load(slot_table + selection * table_width + place, mask=mask, other=-1)
        count += tl.sum((slot >= 0).to(tl.int32), 0)
    return count


@triton.jit
def _shrink_features(
    x_rows: tl.tensor,
    a_rows: tl.tensor,
    has_row: tl.tensor,
    has_rank: tl.tensor,
    begin: int,
    end: int,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 [rows, ranks]: the products over the features from `begin` to `end`, where there are any."""
    total = tl.zeros((x_rows.shape[0], a_rows.shape[0]), dtype=tl.float32)
    for first in range(begin, end, BLOCK_K):
        feature = first + tl.arange(0, BLOCK_K)
        is_feature = feature < end
        x_tile = tl.load(x_rows[:, None] + feature[None, :], mask=has_row[:, None] & is_feature[None, :], other=0.0)
        a_tile = tl.load(a_rows[None, :] + feature[:, None], mask=has_rank[None, :] & is_feature[:, None], other=0.0)
        if x_tile.dtype != a_tile.dtype:
            x_tile = x_tile.to(tl.float32)
            a_tile = a_tile.to(tl.float32)
        total = tl.dot(x_tile, a_tile, total, input_precision="tf32x3")
    return total


@triton.jit
def _sum_parts(
    parts: tl.tensor,
    has_row: tl.tensor,
    rank: tl.tensor,
    has_rank: tl.tensor,
    num_parts: int,
    num_rows: int,
    max_rank: int,
    MAX_PARTS: tl.constexpr,
) -> tl.tensor:
    """float32 [rows, ranks]: what the shrink left, added up in its order; zero where it wrote nothing.

    The loads of all parts are under way together, so the loop is unrolled; those of parts that are not there are
    masked, since a variant for each number of parts would be compiled in the middle of serving.
    """
    total = tl.zeros((has_row.shape[0], rank.shape[0]), dtype=tl.float32)
    for part in tl.static_range(MAX_PARTS):
        place = (parts + tl.cast(num_rows, tl.int64) * max_rank * part)[:, None] + rank[None, :]
        total += tl.load(place, mask=(has_row & (part < num_parts))[:, None] & has_rank[None, :], other=0.0)
    return total


@triton.jit
def _dot_unrounded(a: tl.tensor, b: tl.tensor, total: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """`total + a @ b` with float32 `a`, for a result of `dtype`.

    On 16-bit `b` it is taken in two parts, which keep 16 bits of it or more; a float32 result needs all of them.
    """
    if b.dtype == tl.float32 or dtype == tl.float32:
        return tl.dot(a, b.to(tl.float32), total, input_precision="tf32x3")
    high = a.to(b.dtype)
    low = (a - high.to(tl.float32)).to(b.dtype)
    return tl.dot(low, b, tl.dot(high, b, total))


@triton.jit
def _add_rounded_once(place: tl.tensor, delta: tl.tensor, has_row: tl.tensor, is_column: tl.tensor) -> None:
    mask = has_row[:, None] & is_column[None, :]
    base = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, (base + delta).to(place.dtype.element_ty), mask=mask)
