"""4-bit linear layers of the triton backend in the interpreter, against float64. Scratch is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.quant.reference import dequantize
from loraplex.kernels.quant.triton import dequantize as dequantize_on_gpu
from loraplex.kernels.triton_backend import TritonBackend
from tests.kernels.oracle import assert_close
from tests.kernels.quant.helpers import Quantized, create_quantized
from tests.kernels.triton.interpreter import prepare
from tests.kernels.triton.pairwise import pairwise

prepare()
BACKEND = TritonBackend(80)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# in, out, group size: several splits; a short last group; one group, and odd; the smallest group; rows of a tile in one
SIZES = ((1152, 72, 128), (192, 136, 128), (40, 24, -1), (64, 8, 16), (96, 64, 32))


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def multiply(x: Tensor, quantized: Quantized, bias: Tensor | None = None) -> Tensor:
    return BACKEND.linear(x, BACKEND.prepare_w4(quantized.gptq(), bias, x.dtype))


@pytest.mark.parametrize(
    ("num_rows", "dtype", "size", "act_order", "has_bias"),
    pairwise([0, 1, 16, 17, 64, 65, 133], DTYPES, SIZES, [False, True], [False, True]),
)
def test_equals_the_product_with_the_widened_weight(
    num_rows: int, dtype: torch.dtype, size: tuple[int, int, int], act_order: bool, has_bias: bool
) -> None:
    quantized = create_quantized(*size, act_order=act_order)
    x, bias = normal(num_rows, size[0], dtype=dtype), normal(size[1], dtype=dtype)
    expected = x.double() @ quantized.expected() + (bias.double() if has_bias else 0)
    assert_close(multiply(x, quantized, bias if has_bias else None), expected, dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_widens_to_the_same_bits_as_the_reference(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight = create_quantized(*size, act_order=True).gptq()
    assert torch.equal(dequantize_on_gpu(weight, dtype), dequantize(weight, dtype).T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_beside_others(dtype: torch.dtype) -> None:
    quantized = create_quantized(1152, 72, 128)
    x = normal(16, 1152, dtype=dtype)
    together = multiply(x, quantized)
    for row in (0, 9, 15):
        assert torch.equal(multiply(x[row : row + 1], quantized)[0], together[row])


@pytest.mark.parametrize("num_rows", [5, 40, 70])
def test_nan_in_one_row_stays_there(num_rows: int) -> None:
    quantized = create_quantized(96, 64, 32)
    x = normal(num_rows, 96, dtype=torch.float16)
    clean = multiply(x, quantized)
    x[3] = torch.nan
    poisoned = multiply(x, quantized)
    assert poisoned[3].isnan().all()
    others = [row for row in range(num_rows) if row != 3]
    assert torch.equal(poisoned[others], clean[others])


def test_takes_rows_that_are_not_contiguous() -> None:
    quantized = create_quantized(96, 64, 32, act_order=True)
    wide = torch.full((3, 2, 96), torch.nan)
    wide[:, 1] = normal(3, 96, dtype=torch.float32)
    assert torch.equal(multiply(wide[:, 1], quantized), multiply(wide[:, 1].contiguous(), quantized))
