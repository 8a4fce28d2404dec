"""4-bit linear layers of the backends that run on a CPU, against float64."""

from __future__ import annotations

import logging

import pytest
import torch

from loraplex.kernels.dispatch import Backend
from loraplex.kernels.quant.metadata import W4Linear
from loraplex.kernels.reference import ReferenceBackend
from tests.kernels.cpu.helpers import create_cpu_backend
from tests.kernels.oracle import assert_close
from tests.kernels.quant.helpers import create_quantized

CPU = torch.device("cpu")


def create(name: str) -> Backend:
    return ReferenceBackend(CPU) if name == "reference" else create_cpu_backend()


@pytest.mark.parametrize("name", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_the_product_with_the_widened_weight(
    name: str, dtype: torch.dtype, act_order: bool, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    backend, quantized = create(name), create_quantized(192, 40, 64, act_order=act_order)
    x, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((7, 192), (40,)))
    prepared = backend.prepare_w4(quantized.gptq(), bias if has_bias else None, dtype)
    assert (prepared.in_features, prepared.out_features) == (192, 40)
    expected = x.double() @ quantized.expected() + (bias.double() if has_bias else 0)
    assert_close(backend.linear(x, prepared), expected, dtype)


def test_a_packed_weight_is_counted_with_all_its_tensors() -> None:
    weight = create_quantized(192, 40, 64, act_order=True).gptq()
    linear = W4Linear(weight=weight, bias=torch.zeros(40))
    assert linear.nbytes == 192 * 40 // 2 + 3 * 40 * (2 + 4) + 192 * 4 + 40 * 4


def test_what_the_cpu_backend_widens_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    backend = create_cpu_backend()
    backend.fallbacks.clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            backend.prepare_w4(create_quantized(64, 8, 32).gptq(), None, torch.bfloat16)
    assert backend.fallbacks["w4"] == 2
    assert caplog.text.count("no 4-bit linear layers") == 1
