"""4-bit linear layers in plain torch: the weight is widened in every call, and multiplied."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.quant.layout import unpack_rows
from loraplex.kernels.quant.metadata import W4Linear, W4Weight


def w4_linear(x: Tensor, linear: W4Linear) -> Tensor:
    """`x [T, in]` -> `[T, out]`, bias included. The weight is rounded once to the dtype of `x`."""
    return F.linear(x, dequantize(linear.weight, x.dtype), linear.bias)


def dequantize(weight: W4Weight, dtype: torch.dtype) -> Tensor:
    """`[out, in]`, as a checkpoint without quantization holds it."""
    group = torch.arange(weight.in_features, device=weight.qweight.device) // weight.group_size
    rows = unpack_rows(weight.qweight).float() * weight.scales.float()[group] - weight.scaled_zeros[group]
    if weight.perm is not None:
        rows = torch.empty_like(rows).index_copy_(0, weight.perm.long(), rows)
    return rows.T.to(dtype)
