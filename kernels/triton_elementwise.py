"""RMSNorm, rotary and SiLU-and-multiply in Triton. All arithmetic is float32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_ELEMENTS = 2048  # of a program that takes several short rows
_SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Backend.rms_norm`; `x [T, width]` or `[T, heads, width]`, also a view of something wider."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, None, weight, output, None, eps)
    return output


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `Backend.add_rms_norm`."""
    assert x.shape == residual.shape, "x and residual must have one shape"
    assert residual.is_contiguous(), "the residual stream must be contiguous"
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(output)
    _launch_rms_norm(x, residual, weight, output, total, eps)
    return output, total


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `Backend.rotary`; `q` and `k` may be views of the fused projection and stay as they are."""
    assert q.stride(-1) == k.stride(-1) == cos.stride(-1) == sin.stride(-1) == 1, "head_dim must be contiguous"
    turned_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    turned_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    rotary_kernel[(q.shape[0],)](
        q,
        k,
        cos,
        sin,
        turned_q,
        turned_k,
        *q.stride()[:2],
        *k.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        Q_HEADS=q.shape[1],
        K_HEADS=k.shape[1],
        HALF=q.shape[2] // 2,
        BLOCK_Q=triton.next_power_of_2(q.shape[1]),
        BLOCK_K=triton.next_power_of_2(k.shape[1]),
        BLOCK_HALF=triton.next_power_of_2(q.shape[2] // 2),
        num_warps=4,
    )
    return turned_q, turned_k


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `Backend.silu_and_mul`."""
    assert gate_up.stride(-1) == 1, "features must be contiguous"
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    output = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    silu_and_mul_kernel[(num_tokens, triton.cdiv(width, _SILU_BLOCK))](
        gate_up, output, width, gate_up.stride(0), BLOCK=_SILU_BLOCK, num_warps=4
    )
    return output


def _launch_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, output: Tensor, total: Tensor | None, eps: float
) -> None:
    assert x.stride(-1) == weight.stride(-1) == 1, "features must be contiguous"
    width = x.shape[-1]
    num_heads = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.shape[0] * num_heads
    block_width = triton.next_power_of_2(width)
    block_rows = max(1, _NORM_ELEMENTS // block_width) if x.dim() == 3 else 1
    rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        x,
        residual,
        weight,
        output,
        total,
        eps,
        num_rows,
        num_heads,
        x.stride(0),
        x.stride(-2),
        width,
        BLOCK_ROWS=block_rows,
        BLOCK_WIDTH=block_width,
        num_warps=min(16, max(4, block_width // 512)),
    )


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor | None,
    weight: tl.tensor,
    output: tl.tensor,
    total: tl.tensor | None,
    eps: float,
    num_rows: int,
    num_heads: int,
    stride_token: int,
    stride_head: int,
    width: int,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
) -> None:
    """BLOCK_ROWS rows; row = token * num_heads + head.

    Semantics: total[i, j] = round(x[i, j] + residual[i, j]), or x[i, j] without a residual;
    output[i, j] = round(total[i, j] / sqrt(mean over j of total[i, j]**2 + eps)) * weight[j], rounded.

    Shape:
        x: [num_tokens, num_heads, width] by strides.
        residual, output, total: the same shape, contiguous; residual and total may be None.
        weight: [width].
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (row < num_rows)[:, None] & (column < width)
    source = (row // num_heads * stride_token + row % num_heads * stride_head)[:, None] + column
    place = (row * width)[:, None] + column
    wide = tl.load(x + source, mask=mask, other=0.0).to(tl.float32)
    if residual is not None:
        rounded = (wide + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + place, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    normed = (wide * inverse[:, None]).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(output + place, (normed * scale).to(output.dtype.element_ty), mask=mask)


@triton.jit
def rotary_kernel(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    turned_q: tl.tensor,
    turned_k: tl.tensor,
    stride_q_token: int,
    stride_q_head: int,
    stride_k_token: int,
    stride_k_head: int,
    stride_cos: int,
    stride_sin: int,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One token.

    Semantics, for j < HALF: turned[t, h, j] = x[t, h, j] * cos[t, j] - x[t, h, j + HALF] * sin[t, j] and
    turned[t, h, j + HALF] = x[t, h, j + HALF] * cos[t, j + HALF] + x[t, h, j] * sin[t, j + HALF].

    Shape:
        q, k: [num_tokens, Q_HEADS or K_HEADS, 2 * HALF] by strides.
        cos, sin: [num_tokens, 2 * HALF].
        turned_q, turned_k: as q and k, contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    cos_row = cos + token * stride_cos
    sin_row = sin + token * stride_sin
    q_out = turned_q + token * Q_HEADS * 2 * HALF
    k_out = turned_k + token * K_HEADS * 2 * HALF
    _turn(q + token * stride_q_token, q_out, cos_row, sin_row, stride_q_head, Q_HEADS, HALF, BLOCK_Q, BLOCK_HALF)
    _turn(k + token * stride_k_token, k_out, cos_row, sin_row, stride_k_head, K_HEADS, HALF, BLOCK_K, BLOCK_HALF)


@triton.jit
def _turn(
    x: tl.tensor,
    output: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    stride_head: int,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """All heads of one token of q or k."""
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    is_dim = dim < HALF
    mask = (head < HEADS) & is_dim
    first = tl.load(x + head * stride_head + dim, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + head * stride_head + dim + HALF, mask=mask, other=0.0).to(tl.float32)
    cos_first = tl.load(cos_row + dim, mask=is_dim, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_row + dim, mask=is_dim, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_row + dim + HALF, mask=is_dim, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_row + dim + HALF, mask=is_dim, other=0.0).to(tl.float32)
    place = output + head * (2 * HALF) + dim
    tl.store(place, (first * cos_first - second * sin_first).to(output.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (second * cos_second + first * sin_second).to(output.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_mul_kernel(
    gate_up: tl.tensor,
    output: tl.tensor,
    width: int,
    stride_token: int,
    BLOCK: tl.constexpr,
) -> None:
    """One token, BLOCK columns.

    Semantics: output[t, j] = gate_up[t, j] * sigmoid(gate_up[t, j]) * gate_up[t, width + j].

    Shape:
        gate_up: [num_tokens, 2 * width], rows `stride_token` apart.
        output: [num_tokens, width], contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    row = gate_up + token * stride_token
    gate = tl.load(row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(row + width + column, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(output + token * width + column, result.to(output.dtype.element_ty), mask=mask)
