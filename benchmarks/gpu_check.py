"""Is everything right and fast on this GPU? One command, within six minutes, without network.

    PYTHONPATH=build/ns python -m benchmarks.gpu_check

Needs torch, triton, numpy and safetensors; nothing of the platform. Every section prints as it goes, a failing one
does not stop the others, and the exit code says whether all passed. With $OUT set, the table is kept there as
gpu_check.json and gpu_check.md. `--tiny --device cpu` walks the same way with small shapes and the reference backend.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.device import Device, measure_limits
from benchmarks.gpu.engine import EngineRun, check_engine
from benchmarks.gpu.kernels import check_kernels, time_kernels
from benchmarks.gpu.report import Report, say
from benchmarks.gpu.shapes import LLAMA_8B, SMOLLM2_135M, TINY
from loraplex.engine.models.config import ModelConfig
from loraplex.kernels.dispatch import create_backend

BUDGET_S = 350.0
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is checked, and how large."""

    models: dict[str, ModelConfig]  # whose shapes the kernels get; the first is timed
    engine_model: ModelConfig
    engine_run: EngineRun
    num_tokens: int
    context: int


FULL = Plan(
    models={"Llama-8B": LLAMA_8B, "SmolLM2-135M": SMOLLM2_135M},
    engine_model=LLAMA_8B,
    engine_run=EngineRun(
        dtype="bfloat16", num_adapters=64, batch_sizes=(1, 16, 64), prompt_length=64, num_tokens=64, max_model_len=1024
    ),
    num_tokens=64,
    context=1024,
)
SMALL = Plan(
    models={"tiny": TINY},
    engine_model=TINY,
    engine_run=EngineRun(
        dtype="float32",
        num_adapters=4,
        batch_sizes=(1, 3),
        prompt_length=5,
        num_tokens=4,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 22,
    ),
    num_tokens=5,
    context=33,
)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    device, plan = Device(torch.device(options.device)), SMALL if options.tiny else FULL
    report = Report(budget_s=options.budget_s)
    say(f"{device.name}, torch {torch.__version__}")
    _run_sections(report, device, plan, "reference" if options.device == "cpu" else "triton")
    say("\n" + report.markdown())
    if folder := os.environ.get("OUT"):
        report.save(Path(folder))
    return 0 if report.passed else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds after which no new case is begun")
    return parser.parse_args(arguments)


def _run_sections(report: Report, device: Device, plan: Plan, backend_name: str) -> None:
    """The engine first: its figures are what matters most if the time does not suffice."""
    backend = create_backend(backend_name, device.device)
    report.run("engine", lambda: check_engine(report, device, backend, plan.engine_model, plan.engine_run))
    sizes = {"num_tokens": plan.num_tokens, "context": plan.context}
    for name, config in plan.models.items():
        for dtype in DTYPES:
            check = partial(check_kernels, report, device, backend, config, name=name, dtype=dtype, **sizes)
            report.run("kernels", check)

    def time_all() -> None:
        limits = measure_limits(device, DTYPES)
        report.add(
            "speed",
            "limits of the device",
            copy_gb_per_s=limits.bytes_per_s / 1e9,
            bfloat16_tflops=limits.flops_per_s[torch.bfloat16] / 1e12,
            float16_tflops=limits.flops_per_s[torch.float16] / 1e12,
            float32_tflops=limits.flops_per_s[torch.float32] / 1e12,
        )
        for name, config in plan.models.items():
            time_kernels(report, device, backend, config, name=name, dtype=torch.bfloat16, limits=limits, **sizes)

    report.run("speed", time_all)


if __name__ == "__main__":
    sys.exit(main())
