"""`make bench`: our engine and its peers on the same requests, in turn, in processes of their own, in one run.

Only ratios between figures of one run mean anything: the machines are noisy, so everybody runs in every round, and
medians of at least three rounds are compared. Writes `benchmarks/results.json` and `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.request_set import ensure_adapters
from loraplex.platform.demo.model import ensure_demo_model

ROOT = Path(__file__).parents[1]
# module, backend
CONTESTANTS = (("loraplex_offline", "auto"), ("loraplex_offline", "reference"), ("transformers_peft", "auto"))
WORKLOADS = {"base_s16": (16, 0), "lora8_s16": (16, 8)}  # name -> requests, adapters

Rounds = dict[str, dict[str, list[dict[str, Any]]]]  # workload -> contestant -> reports


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    arguments = parser.parse_args()
    demo_dir = ROOT / ".demo"
    model, adapters = ensure_demo_model(demo_dir), demo_dir / "bench-adapters"
    ensure_adapters(model, adapters, max(WORKLOADS[name][1] for name in arguments.workloads))

    rounds: Rounds = {name: {} for name in arguments.workloads}
    for number in range(arguments.rounds):
        for workload in arguments.workloads:
            for runner, backend in CONTESTANTS:
                report = _run(runner, backend, workload, model, adapters)
                rounds[workload].setdefault(report["name"], []).append(report)
                sys.stdout.write(
                    f"round {number + 1} {workload} {report['name']}: {report['tokens_per_s']:.1f} tok/s\n"
                )
                sys.stdout.flush()
    results = _summarise(rounds)
    (ROOT / "benchmarks" / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (ROOT / "benchmarks" / "RESULTS.md").write_text(_markdown(results))
    sys.stdout.write(_markdown(results))


def _run(runner: str, backend: str, workload: str, model: Path, adapters: Path) -> dict[str, Any]:
    num_requests, num_adapters = WORKLOADS[workload]
    command = [sys.executable, "-m", f"benchmarks.runners.{runner}", "--model", str(model), "--adapters", str(adapters)]
    command += ["--num-requests", str(num_requests), "--num-adapters", str(num_adapters)]
    command += ["--backend", backend]
    environment = os.environ | {"OMP_WAIT_POLICY": "passive"}  # as our engine process has it; good for all here
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{runner} failed on {workload}:\n{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return report


def _summarise(rounds: Rounds) -> dict[str, Any]:
    medians = {
        workload: {
            name: statistics.median(report["tokens_per_s"] for report in reports)
            for name, reports in contestants.items()
        }
        for workload, contestants in rounds.items()
    }
    ratios = {
        f"{workload}_{name.replace(' ', '_')}_over_transformers_peft": figure / figures["transformers+peft"]
        for workload, figures in medians.items()
        for name, figure in figures.items()
        if name != "transformers+peft"
    }
    if "base_s16" in medians and "lora8_s16" in medians:
        ratios["lora8_s16_over_base"] = medians["lora8_s16"]["loraplex"] / medians["base_s16"]["loraplex"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": commit.stdout.strip(),
        "machine": {"processor": _processor(), "system": platform.platform(), "gpu": "not run on a GPU"},
        "ratios": ratios,
        "median_tokens_per_s": medians,
        "rounds": rounds,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "# Results",
        "",
        f"Commit {results['commit'][:12]}, {results['machine']['processor']}, not run on a GPU.",
        "Output tokens per second: median (smallest to largest) over the rounds of one run. 16 requests of 32 to 512",
        "prompt tokens and 64 output tokens each, SmolLM2-135M in bfloat16; `lora8` spreads them over 8 adapters of",
        "ranks 8 to 64 on all linear layers.",
        "",
        "| workload | contestant | tokens/s | backend or version | threads |",
        "|---|---|--:|---|--:|",
    ]
    for workload, contestants in results["rounds"].items():
        for name, reports in contestants.items():
            figures = sorted(report["tokens_per_s"] for report in reports)
            spread = f"{statistics.median(figures):.1f} ({figures[0]:.1f} to {figures[-1]:.1f}) [{len(figures)}]"
            what = reports[0].get("backend") or reports[0].get("version")
            lines.append(f"| {workload} | {name} | {spread} | {what} | {reports[0]['threads']} |")
    lines += ["", "| ratio | value |", "|---|--:|"]
    lines += [f"| {name} | {value:.2f} |" for name, value in results["ratios"].items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
