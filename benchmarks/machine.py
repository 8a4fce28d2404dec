"""What this machine can do at best right now: bytes per second from memory, multiply-adds per second in matrices.

    python -m benchmarks.machine        prints one JSON line

Bandwidth is that of a sum over 512 MiB of float32 on all cores, far more than any cache holds, read front to back. They
lie in huge pages, as our weights do: through small ones we would be measured by half of what the memory gives.
The matrix rates are those of `torch.matmul` on square matrices of 2048, the best that the processor's library does.
Each is the median of seven.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

READ_BYTES = 512 * 2**20
MATRIX_SIZE = 2048
REPETITIONS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second: bytes read, floating-point operations (a multiply-add is two)."""

    read_bytes: float
    bf16_flops: float
    fp32_flops: float


def measure_rates() -> Rates:
    import torch

    from loraplex.kernels.cpu import huge_pages

    values = huge_pages.empty(READ_BYTES // 4, dtype=torch.float32, device=torch.device("cpu")).fill_(1)
    square = torch.randn(MATRIX_SIZE, MATRIX_SIZE)
    half = square.to(torch.bfloat16)
    flops = 2 * MATRIX_SIZE**3
    with torch.inference_mode():
        return Rates(
            read_bytes=READ_BYTES / median_seconds(values.sum),
            bf16_flops=flops / median_seconds(lambda: half @ half),
            fp32_flops=flops / median_seconds(lambda: square @ square),
        )


def median_seconds(action: Callable[[], Any], repetitions: int = REPETITIONS) -> float:
    """Of `repetitions`, after two that do not count."""
    seconds = []
    for _ in range(repetitions + 2):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])


def describe() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
        "gpu": "not run on a GPU",
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(measure_rates())) + "\n")
