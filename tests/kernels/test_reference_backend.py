"""The plain functions of the reference backend, and how a backend is chosen."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F

from loraplex.kernels import reference
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.reference import PackedLinear, PlainLinear, ReferenceBackend
from tests.kernels.oracle import assert_close

CPU = torch.device("cpu")
BACKEND = ReferenceBackend(CPU)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 7, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_x_times_the_transposed_weight(dtype: torch.dtype, num_rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((num_rows, 33), (96, 33), (96,)))
    prepared = BACKEND.prepare_linear(weight, bias if has_bias else None)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert (prepared.in_features, prepared.out_features) == (33, 96)
    assert prepared.nbytes == (weight.numel() + has_bias * 96) * dtype.itemsize
    assert_close(BACKEND.linear(x, prepared), expected, dtype)


def test_float32_weights_are_kept_as_they_are() -> None:
    weight, x = torch.randn(96, 64), torch.randn(5, 64)
    prepared = BACKEND.prepare_linear(weight, None)
    assert isinstance(prepared, PlainLinear)
    assert prepared.weight is weight
    assert torch.equal(prepared.rows(torch.tensor([3, 0])), weight[[3, 0]])
    assert torch.equal(BACKEND.linear(x, prepared), F.linear(x, weight))


def test_bfloat16_weights_are_packed_where_torch_can() -> None:
    weight = torch.randn(96, 64).bfloat16()
    prepared = BACKEND.prepare_linear(weight, None)
    assert isinstance(prepared, PackedLinear if BACKEND.packs_bfloat16 else PlainLinear)


def test_a_torch_without_the_packed_form_is_said_and_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    monkeypatch.setattr(reference, "_pack", refuse)
    with caplog.at_level(logging.WARNING):
        backend = ReferenceBackend(CPU)
    assert "cannot prepack" in caplog.text
    weight, x = torch.randn(96, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    assert torch.equal(backend.linear(x, backend.prepare_linear(weight, None)), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual, weight = (torch.randn(s, generator=generator).to(dtype) for s in ((5, 64), (5, 64), (64,)))
    wide = (x + residual).double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    normed, total = BACKEND.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, expected, dtype)
    assert torch.equal(BACKEND.rms_norm(total, weight, 1e-6), normed)


def test_rotary_turns_each_pair_by_its_angle() -> None:
    q, k = torch.randn(3, 2, 8), torch.randn(3, 1, 8)
    angle = torch.rand(3, 4)
    turn = torch.cat((angle, angle), dim=-1)
    turned_q, turned_k = BACKEND.rotary(q, k, turn.cos(), turn.sin())
    for given, turned in ((q, turned_q), (k, turned_k)):
        pairs = torch.complex(given[..., :4], given[..., 4:]) * torch.polar(torch.ones_like(angle), angle).unsqueeze(1)
        torch.testing.assert_close(turned, torch.cat((pairs.real, pairs.imag), dim=-1))


def test_silu_and_mul() -> None:
    gate_up = torch.randn(3, 14)
    expected = gate_up[:, :7] * torch.sigmoid(gate_up[:, :7]) * gate_up[:, 7:]
    torch.testing.assert_close(BACKEND.silu_and_mul(gate_up), expected)


def test_the_reference_backend_is_found_by_name() -> None:
    assert create_backend("reference", CPU).name == "reference"


def test_an_unknown_backend_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"'cuda-magic' does not exist; there are auto, reference, cpu, triton"):
        create_backend("cuda-magic", CPU)
