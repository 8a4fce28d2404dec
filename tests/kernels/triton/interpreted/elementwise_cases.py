"""The element-wise functions of the triton backend in the interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.dispatch import RowSource
from loraplex.kernels.triton_backend import TritonBackend
from tests.kernels.oracle import assert_close
from tests.kernels.triton.interpreter import prepare

prepare()
BACKEND = TritonBackend(80)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def expected_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 64), (1, 41), (5, 576), (3, 2049)])
def test_rms_norm(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    x, weight = normal(num_tokens, width, dtype=dtype), normal(width, dtype=dtype)
    residual = normal(num_tokens, width, dtype=dtype) / 3
    assert_close(BACKEND.rms_norm(x, weight, 1e-6), expected_norm(x, weight), dtype)
    normed, total = BACKEND.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, BACKEND.rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_fused_projection(dtype: torch.dtype) -> None:
    fused, weight = normal(7, 10 * 64, dtype=dtype), normal(64, dtype=dtype)
    heads = fused[:, 64 : 64 * 10].view(7, 9, 64)
    normed = BACKEND.rms_norm(heads, weight, 1e-6)
    assert normed.is_contiguous()
    assert_close(normed, expected_norm(heads, weight), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (1, 1, 2)])
def test_rotary_turns_each_pair_by_its_angle(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    fused = normal(3, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    q, k, _ = torch.split(fused, [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=-1)
    given = (q.view(3, heads, head_dim), k.view(3, kv_heads, head_dim))
    before = fused.clone()
    angle = normal(3, head_dim // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    for x, turned in zip(given, BACKEND.rotary(*given, cos, sin), strict=True):
        first, second = x.double().chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
        assert_close(turned, x.double() * cos.double()[:, None] + other * sin.double()[:, None], dtype)
    assert torch.equal(fused, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 7), (3, 1536)])
def test_silu_and_mul(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = normal(num_tokens, 2 * width, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(BACKEND.silu_and_mul(gate_up), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_torch_s(dtype: torch.dtype) -> None:
    x, weight, bias = normal(3, 33, dtype=dtype), normal(96, 33, dtype=dtype), normal(96, dtype=dtype)
    prepared = BACKEND.prepare_linear(weight, bias)
    assert torch.equal(BACKEND.linear(x, prepared), torch.nn.functional.linear(x, weight, bias))
    assert isinstance(prepared, RowSource)
    assert torch.equal(prepared.rows(torch.tensor([3, 0])), weight[[3, 0]])
