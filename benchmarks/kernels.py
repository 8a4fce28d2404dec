"""`make bench-kernels`: every kernel of the CPU's backend against its roofline, in a table of `RESULTS.md`.

    python -m benchmarks.kernels [--backend NAME]

The roofline of a call is the larger of its bytes over the bandwidth and its operations over the matrix rate, both
measured here in the same process. Times are the median of five passes over more copies than a cache holds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.kernel_cases import CPU, KernelCase, kernel_cases
from benchmarks.machine import Rates, measure_rates, median_seconds
from benchmarks.materials import demo_model
from benchmarks.report import write_part
from benchmarks.results import current_commit
from loraplex.engine.threads import default_num_threads
from loraplex.kernels.dispatch import create_backend

PASSES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    backend = create_backend(parser.parse_args().backend, CPU)
    torch.set_num_threads(default_num_threads())
    torch.manual_seed(0)
    rates = measure_rates()
    rows = []
    with torch.inference_mode():
        for case in kernel_cases(backend, demo_model()):
            rows.append(_measure(case, rates))
            _show(rows[-1])
    part = {"commit": current_commit(), "backend": backend.name, "rates": asdict(rates), "rows": rows}
    write_part("kernels", part)


def _measure(case: KernelCase, rates: Rates) -> dict[str, Any]:
    seconds = median_seconds(lambda: [call() for call in case.calls], PASSES) / len(case.calls)
    roofline_s = max(case.num_bytes / rates.read_bytes, case.flops / rates.bf16_flops)
    return {
        "kernel": case.kernel,
        "shape": case.shape,
        "us": 1e6 * seconds,
        "gb_per_s": case.num_bytes / seconds / 1e9,
        "gflop_per_s": case.flops / seconds / 1e9,
        "of_roofline": roofline_s / seconds,
    }


def _show(row: dict[str, Any]) -> None:
    sys.stdout.write(
        f"{row['kernel']:20} {row['shape']:40} {row['us']:9.1f} us {row['gb_per_s']:6.1f} GB/s "
        f"{row['gflop_per_s']:6.0f} GFLOP/s {row['of_roofline']:5.0%}\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
