"""The device under test: how long something takes on it, and what it can do at best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_FLUSH_BYTES = {"cuda": 1 << 30, "cpu": 1 << 16}  # clears the caches, and outlasts the launch of what is timed
_COPY_BYTES = {"cuda": 2 << 30, "cpu": 1 << 22}
_MATRIX = {"cuda": 8192, "cpu": 256}


class Device:
    """Times computations on one device. A time is the median over cold caches."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(_FLUSH_BYTES[device.type], dtype=torch.uint8, device=device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time_s(self, compute: Callable[[], object], *, repeats: int = 15) -> float:
        compute()
        times = [self._time_once(compute) for _ in range(repeats)]
        return statistics.median(times)

    def _time_once(self, compute: Callable[[], object]) -> float:
        self._flush.zero_()
        if self.device.type != "cuda":
            start = time.perf_counter()
            compute()
            return time.perf_counter() - start
        before = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch gives it no types
        after = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        before.record(torch.cuda.current_stream(self.device))
        compute()
        after.record(torch.cuda.current_stream(self.device))
        after.synchronize()
        return float(before.elapsed_time(after)) / 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What was measured in this run."""

    bytes_per_s: float  # of a large copy, read and write together
    flops_per_s: dict[torch.dtype, float]  # of a large matrix product


def measure_limits(device: Device, dtypes: tuple[torch.dtype, ...]) -> Limits:
    kind = device.device.type
    source = torch.zeros(_COPY_BYTES[kind], dtype=torch.uint8, device=device.device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.numel() / device.time_s(lambda: target.copy_(source))
    size = _MATRIX[kind]
    flops: dict[torch.dtype, float] = {}
    for dtype in dtypes:
        matrix = torch.randn(size, size, device=device.device).to(dtype)
        flops[dtype] = 2 * size**3 / device.time_s(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]
    return Limits(bytes_per_s=bytes_per_s, flops_per_s=flops)
