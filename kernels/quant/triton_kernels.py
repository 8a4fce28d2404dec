"""The kernels of 4-bit linear layers; `kernels/quant/triton.py` says how they work together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def w4_kernel(
    x: tl.tensor,
    qweight: tl.tensor,
    scales: tl.tensor,
    scaled_zeros: tl.tensor,
    perm: tl.tensor | None,
    bias: tl.tensor | None,
    y: tl.tensor,
    num_rows: int,
    in_features: int,
    out_features: int,
    group_size: int,
    stride_x: int,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One tile of rows and columns, one split of the features. A tile of features is of one group.

    Semantics: y[s, i, n] = sum over rows k of split s of x[i, perm[k]] * w[k, n], (+ bias[n]), w as in `W4Weight`.

    Shape:
        x: [num_rows, in_features], rows `stride_x` apart.
        y: [NUM_SPLITS, num_rows, out_features], contiguous; float32 unless NUM_SPLITS is 1.
        The others as in `W4Weight`; bias [out_features].
    """
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < out_features
    x_rows = x + row.to(tl.int64) * stride_x
    split_size = tl.cdiv(tl.cdiv(in_features, NUM_SPLITS), BLOCK_K) * BLOCK_K
    begin = tl.program_id(2) * split_size
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(begin, tl.minimum(begin + split_size, in_features), BLOCK_K):
        feature = first + tl.arange(0, BLOCK_K)
        is_feature = feature < in_features
        if perm is not None:
            feature = tl.load(perm + feature, mask=is_feature, other=0)
        x_tile = tl.load(x_rows[:, None] + feature[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0)
        w_tile = _weight_tile(
            qweight, scales, scaled_zeros, first, column, is_column, in_features, out_features, group_size, BLOCK_K
        )
        total = tl.dot(x_tile, w_tile.to(x_tile.dtype), total, input_precision="tf32x3")
    if bias is not None:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = (tl.program_id(2).to(tl.int64) * num_rows + row[:, None]) * out_features + column[None, :]
    tl.store(y + place, total.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit(do_not_specialize=["size"])
def sum_splits_kernel(
    partials: tl.tensor,
    bias: tl.tensor | None,
    y: tl.tensor,
    size: int,
    out_features: int,
    NUM_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """BLOCK elements of y.

    Semantics: y[i, n] = sum over s of partials[s, i, n] (+ bias[n]), rounded once.

    Shape:
        partials: float32 [NUM_SPLITS, rows, out_features]. y: [rows, out_features], of `size` elements.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_place = place < size
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(partials + split * tl.cast(size, tl.int64) + place, mask=is_place, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % out_features, mask=is_place, other=0.0).to(tl.float32)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=is_place)


@triton.jit
def dequantize_kernel(
    qweight: tl.tensor,
    scales: tl.tensor,
    scaled_zeros: tl.tensor,
    perm: tl.tensor | None,
    widened: tl.tensor,
    in_features: int,
    out_features: int,
    group_size: int,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One tile. Semantics: widened[perm[k], n] = w[k, n], rounded once, with all names as in `W4Weight`."""
    first = tl.program_id(0) * BLOCK_K
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < out_features
    tile = _weight_tile(
        qweight, scales, scaled_zeros, first, column, is_column, in_features, out_features, group_size, BLOCK_K
    )
    feature = first + tl.arange(0, BLOCK_K)
    is_feature = feature < in_features
    if perm is not None:
        feature = tl.load(perm + feature, mask=is_feature, other=0)
    place = widened + feature.to(tl.int64)[:, None] * out_features + column[None, :]
    tl.store(place, tile.to(widened.dtype.element_ty), mask=is_feature[:, None] & is_column[None, :])


@triton.jit
def _weight_tile(
    qweight: tl.tensor,
    scales: tl.tensor,
    scaled_zeros: tl.tensor,
    first: int,
    column: tl.tensor,
    is_column: tl.tensor,
    in_features: int,
    out_features: int,
    group_size: int,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """float32 [BLOCK_K, columns]: the rows from `first` on, all of one group. Each word is loaded once."""
    word = first // 8 + tl.arange(0, BLOCK_K // 8)
    place = word.to(tl.int64)[:, None] * out_features + column[None, :]
    packed = tl.load(qweight + place, mask=(word < in_features // 8)[:, None] & is_column[None, :], other=0)
    shift = tl.arange(0, 8) * 4
    nibble = tl.reshape((packed[:, None, :] >> shift[None, :, None]) & 0xF, (BLOCK_K, column.shape[0]))
    group = tl.cast(first // group_size, tl.int64) * out_features + column
    scale = tl.load(scales + group, mask=is_column, other=0.0).to(tl.float32)
    scaled_zero = tl.load(scaled_zeros + group, mask=is_column, other=0.0)
    return nibble.to(tl.float32) * scale[None, :] - scaled_zero[None, :]
