"""The plain functions of the C++ backend, in each instruction set, against the reference or float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.cpu.backend import CpuBackend
from loraplex.kernels.cpu.linear import PanelLinear
from loraplex.kernels.dispatch import RowSource
from loraplex.kernels.reference import ReferenceBackend
from tests.kernels.cpu.helpers import CPU, TARGETS, create_cpu_backend
from tests.kernels.oracle import assert_close

REFERENCE = ReferenceBackend(CPU)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=TARGETS)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return create_cpu_backend(request.param)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (33, 7), (96, 160), (131, 65), (576, 192), (4099, 50)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_is_x_times_the_transposed_weight(
    backend: CpuBackend, in_features: int, out_features: int, has_bias: bool, dtype: torch.dtype
) -> None:
    weight, bias = normal(out_features, in_features, dtype=dtype), normal(out_features, dtype=dtype, seed=1)
    prepared = backend.prepare_linear(weight, bias if has_bias else None)
    assert (prepared.in_features, prepared.out_features) == (in_features, out_features)
    for num_rows in (0, 1, 2, 5, 12, 13, 40, 131):
        x = normal(num_rows, in_features, dtype=dtype, seed=2)
        expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
        assert_close(backend.linear(x, prepared), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_linear_has_the_same_bits_among_any_others(backend: CpuBackend, dtype: torch.dtype) -> None:
    prepared = backend.prepare_linear(normal(200, 131, dtype=dtype), normal(200, dtype=dtype))
    x = normal(150, 131, dtype=dtype, seed=1)
    together = backend.linear(x, prepared)
    for rows in ([0], [149], [7, 3], list(range(13)), list(range(20, 120))):
        assert torch.equal(backend.linear(x[rows], prepared), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), [(1, 1), (33, 70), (96, 160)])
def test_rows_come_out_of_the_panels_as_they_went_in(
    backend: CpuBackend, in_features: int, out_features: int, dtype: torch.dtype
) -> None:
    weight = normal(out_features, in_features, dtype=dtype)
    prepared = backend.prepare_linear(weight, None)
    assert isinstance(prepared, RowSource)
    ids = torch.arange(out_features).flip(0).repeat(3)
    assert torch.equal(prepared.rows(ids), weight[ids])
    assert prepared.rows(ids[:0]).shape == (0, in_features)


@pytest.mark.parametrize("bad", [-1, 70])
def test_a_row_that_is_not_there_is_refused(backend: CpuBackend, bad: int) -> None:
    prepared = backend.prepare_linear(normal(70, 33), None)
    assert isinstance(prepared, RowSource)
    with pytest.raises(IndexError, match=f"{bad}.*there are 70"):
        prepared.rows(torch.tensor([3, bad]))


def test_nan_stays_in_its_row(backend: CpuBackend) -> None:
    prepared = backend.prepare_linear(normal(70, 33, dtype=torch.bfloat16), None)
    x = normal(14, 33, dtype=torch.bfloat16)
    clean = backend.linear(x, prepared)
    x[5, 32] = torch.nan
    poisoned = backend.linear(x, prepared)
    assert poisoned[5].isnan().all()
    others = [row for row in range(14) if row != 5]
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
def test_takes_rows_that_lie_apart(backend: CpuBackend, dtype: torch.dtype) -> None:
    wide = normal(6, 3 * 96, dtype=dtype)
    part, heads = wide[:, 96:192], wide.view(6, 9, 32)[:, 2:5]
    prepared = backend.prepare_linear(normal(40, 96, dtype=dtype), None)
    weight = normal(32, dtype=dtype)
    assert torch.equal(backend.linear(part, prepared), backend.linear(part.contiguous(), prepared))
    assert torch.equal(backend.rms_norm(heads, weight, 1e-5), backend.rms_norm(heads.contiguous(), weight, 1e-5))
    assert torch.equal(backend.rms_norm(heads[:, 0], weight, 1e-5), backend.rms_norm(heads, weight, 1e-5)[:, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 64, 131])
@pytest.mark.parametrize("num_rows", [0, 1, 9, 300])
def test_norms_equal_the_reference(backend: CpuBackend, num_rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = normal(num_rows, size, dtype=dtype), normal(num_rows, size, dtype=dtype, seed=1)
    weight = normal(size, dtype=dtype, seed=2)
    normed, total = backend.add_rms_norm(x, residual, weight, 1e-5)
    expected, _ = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert_close(normed, expected, dtype)
    assert torch.equal(backend.rms_norm(total, weight, 1e-5), normed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 34, 64, 80])
def test_rotary_equals_the_reference(backend: CpuBackend, head_dim: int, dtype: torch.dtype) -> None:
    q, k = normal(5, 4, head_dim, dtype=dtype), normal(5, 2, head_dim, dtype=dtype, seed=1)
    angle = normal(5, head_dim, seed=2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    given = q.clone()
    for actual, expected in zip(backend.rotary(q, k, cos, sin), REFERENCE.rotary(q, k, cos, sin), strict=True):
        assert_close(actual, expected, dtype)
    assert torch.equal(q, given)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_float64_from_end_to_end(backend: CpuBackend, dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 777), torch.tensor([0.0, -0.0, -88.0, 88.0, 1e4, -1e4])))
    up = normal(len(gate))
    gate_up = torch.stack((gate, up)).to(dtype).view(1, -1)
    wide_gate, wide_up = gate_up.double().chunk(2, dim=-1)
    assert_close(backend.silu_and_mul(gate_up), wide_gate * wide_gate.sigmoid() * wide_up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 255, 256, 257, 1000, 4099])
def test_the_largest_of_a_row_is_the_first_among_equals(backend: CpuBackend, size: int, dtype: torch.dtype) -> None:
    rounded = (normal(40, size, seed=size) * 4).round().to(dtype)  # ties all over
    falling = torch.linspace(3, -3, size).to(dtype).expand(2, -1)
    zeros = torch.tensor([-0.0, 0.0]).repeat(size)[:size].to(dtype)  # equal, whatever their bits
    values = torch.cat((rounded, falling, falling.flip(-1), zeros.view(1, -1), zeros.view(1, -1) - 1))
    places, is_finite = backend.row_maximum(values)
    assert torch.equal(places, values.argmax(dim=-1))
    assert is_finite.all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 255, 256, 998])
def test_a_row_with_one_value_that_is_not_finite_is_found(backend: CpuBackend, place: int, dtype: torch.dtype) -> None:
    values = normal(9, 999, dtype=dtype)
    limits = torch.finfo(dtype)
    for row, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf, limits.max, limits.min, limits.tiny)):
        values[row, place] = value
    assert backend.row_maximum(values)[1].tolist() == [False] * 4 + [True] * 5


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(backend: CpuBackend, num_threads: int) -> None:
    prepared = backend.prepare_linear(normal(500, 96, dtype=torch.bfloat16), None)
    x = normal(300, 96, dtype=torch.bfloat16)
    expected = backend.linear(x, prepared)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert all(torch.equal(backend.linear(x, prepared), expected) for _ in range(20))
    finally:
        torch.set_num_threads(before)


def test_float16_takes_the_references_way_and_is_counted() -> None:
    backend = CpuBackend(CPU, library=create_cpu_backend().library)
    x, weight = normal(3, 32, dtype=torch.float16), normal(32, dtype=torch.float16)
    assert torch.equal(backend.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    prepared = backend.prepare_linear(normal(8, 32, dtype=torch.float16), None)
    assert not isinstance(prepared, PanelLinear)
    assert backend.linear(x, prepared).shape == (3, 8)
    assert backend.fallbacks == {"rms_norm": 1, "linear": 2}


def test_subnormal_numbers_survive_the_library_being_loaded() -> None:
    """-ffast-math would have switched the whole process to flushing them to zero."""
    create_cpu_backend()
    assert (torch.full((8,), 1e-40) * 1).count_nonzero() == 8
