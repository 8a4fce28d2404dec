"""Every kernel against the reference in float32 on the same values, and against what the device can do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.device import Device, Limits
from benchmarks.gpu.kernel_cases import Cases, KernelCase
from benchmarks.gpu.report import Report
from loraplex.engine.models.config import ModelConfig
from loraplex.kernels.dispatch import Backend
from loraplex.kernels.reference import ReferenceBackend

# Largest absolute error over the largest absolute value of the reference.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def check_kernels(
    report: Report,
    device: Device,
    backend: Backend,
    config: ModelConfig,
    *,
    name: str,
    dtype: torch.dtype,
    num_tokens: int,
    context: int,
) -> None:
    """Numbers only; the first launch of each variant compiles it."""
    cases = Cases(config, dtype=dtype, device=device.device, num_tokens=num_tokens, context=context)
    reference = ReferenceBackend(device.device)
    for case in cases.all():
        report.check_time()
        actual = case.prepare(backend, dtype)()
        expected = case.prepare(reference, torch.float32)()
        error = worst_error(actual, expected)
        passed = error <= TOLERANCE[dtype]
        report.add("kernels", f"{name}, {_short(dtype)}: {case.name}", passed=passed, relative_error=error)


def time_kernels(
    report: Report,
    device: Device,
    backend: Backend,
    config: ModelConfig,
    *,
    name: str,
    dtype: torch.dtype,
    limits: Limits,
    num_tokens: int,
    context: int,
) -> None:
    cases = Cases(config, dtype=dtype, device=device.device, num_tokens=num_tokens, context=context)
    for case in cases.all():
        if case.is_timed:
            report.check_time()
            seconds = device.time_s(case.prepare(backend, dtype))
            floor = _floor_s(case, limits, dtype)
            report.add(
                "speed",
                f"{name}, {_short(dtype)}: {case.name}",
                time_us=1e6 * seconds,
                floor_us=1e6 * floor,
                share_of_floor=floor / seconds,
            )


def worst_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Of all outputs; infinite when one of them is not finite."""
    errors = [
        float((mine.float() - theirs).abs().max() / theirs.abs().max().clamp(min=1e-6))
        if bool(mine.isfinite().all())
        else float("inf")
        for mine, theirs in zip(actual, expected, strict=True)
    ]
    return max(errors)


def _floor_s(case: KernelCase, limits: Limits, dtype: torch.dtype) -> float:
    return max(case.num_bytes / limits.bytes_per_s, case.num_flops / limits.flops_per_s[dtype])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
