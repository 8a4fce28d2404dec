"""4-bit linear layers in Triton: the packed weight is multiplied as it is for few rows, and widened once for many.

A decode reads a quarter of the bytes. Its sum over `in_features` is split, by the weight's shape alone, so that a
narrow weight fills the GPU as well; the splits store float32 partial sums, which a second kernel adds in a fixed order.
From some number of rows on, arithmetic is what costs: then the weight is widened into a scratch matrix that lives for
this call only (torch's allocator hands the same memory to the next layer), and cuBLAS multiplies.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loraplex.kernels.quant.metadata import W4Linear, W4Weight
from loraplex.kernels.quant.triton_kernels import dequantize_kernel, sum_splits_kernel, w4_kernel
from loraplex.kernels.triton_configs import W4_MAX_ROWS, W4Config, w4_config, w4_splits

_DEQUANTIZE_ROWS, _DEQUANTIZE_COLUMNS = 64, 64
_SUM_BLOCK = 1024


def w4_linear(x: Tensor, linear: W4Linear, *, architecture: int) -> Tensor:
    """`x [T, in]` -> `[T, out]`, bias included; `architecture` is a key of the configuration table."""
    assert x.stride(-1) == 1, "features must be contiguous"
    if len(x) > W4_MAX_ROWS:
        widened = dequantize(linear.weight, x.dtype)
        return x @ widened if linear.bias is None else torch.addmm(linear.bias, x, widened)
    if len(x) == 0:
        return x.new_empty(0, linear.out_features)
    config = w4_config(architecture, itemsize=x.element_size(), num_rows=len(x))
    return _multiply(x, linear, config)


def dequantize(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """`[in, out]` in the order of the input's features."""
    widened = torch.empty(weight.in_features, weight.out_features, dtype=dtype, device=weight.qweight.device)
    block_k = _block_k(_DEQUANTIZE_ROWS, weight)
    grid = (triton.cdiv(weight.in_features, block_k), triton.cdiv(weight.out_features, _DEQUANTIZE_COLUMNS))
    dequantize_kernel[grid](
        weight.qweight,
        weight.scales,
        weight.scaled_zeros,
        weight.perm,
        widened,
        weight.in_features,
        weight.out_features,
        weight.group_size,
        BLOCK_K=block_k,
        BLOCK_N=_DEQUANTIZE_COLUMNS,
        num_warps=4,
    )
    return widened


def _multiply(x: Tensor, linear: W4Linear, config: W4Config) -> Tensor:
    weight = linear.weight
    num_rows, out_features = len(x), weight.out_features
    y = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    num_splits = w4_splits(in_features=weight.in_features, out_features=out_features)
    partials = y if num_splits == 1 else y.new_empty(num_splits, num_rows, out_features, dtype=torch.float32)
    grid = (triton.cdiv(out_features, config.block_n), triton.cdiv(num_rows, config.block_m), num_splits)
    w4_kernel[grid](
        x,
        weight.qweight,
        weight.scales,
        weight.scaled_zeros,
        weight.perm,
        linear.bias if num_splits == 1 else None,
        partials,
        num_rows,
        weight.in_features,
        out_features,
        weight.group_size,
        x.stride(0),
        NUM_SPLITS=num_splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=_block_k(config.block_k, weight),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if num_splits > 1:
        sum_splits_kernel[(triton.cdiv(y.numel(), _SUM_BLOCK),)](
            partials, linear.bias, y, y.numel(), out_features, NUM_SPLITS=num_splits, BLOCK=_SUM_BLOCK, num_warps=4
        )
    return y


def _block_k(wanted: int, weight: W4Weight) -> int:
    """Rows of a tile, all of one group: at most `wanted`, a power of two."""
    if weight.group_size >= weight.in_features:
        return wanted
    return min(wanted, weight.group_size & -weight.group_size)
