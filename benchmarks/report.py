"""Writes what was measured: `results.json` for programs, `RESULTS.md` and `results.svg` for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.plot import bars_svg
from benchmarks.results import LATENCY, SPEED
from benchmarks.targets import TARGETS
from benchmarks.workloads import WORKLOADS

FOLDER = Path(__file__).parent
JSON_FILE = FOLDER / "results.json"
MARKDOWN_FILE = FOLDER / "RESULTS.md"
PLOT_FILE = FOLDER / "results.svg"

SPEED_WORKLOADS = ("base_s16", "base_s64", "served_s64", "lora8_s16", "lora64_s64")

INTRODUCTION = """\
SmolLM2-135M in bfloat16 on {cores} cores of {processor}; {gpu}. Commit {commit}.

Everybody answered the same requests in the same run, in turn, each in a process of its own: prompts of 32, 128 or 512
random tokens, 64 tokens out each, greedy. S16 is 4,352 tokens in and 1,024 out, S64 is 15,680 in and 4,096 out. The
adapters have ranks 8, 16, 32 and 64 in turn, on all seven projections, in bfloat16, and are resident before the clock
starts. A peer that has no offline mode (llama.cpp) is asked over HTTP with all requests open at once, or 32 of S64.
`make bench` writes this page.
"""


def write_results(run: dict[str, Any]) -> None:
    """Replace what an earlier run found, and keep what other commands wrote beside it (`cases`, `kernels`)."""
    kept = {name: part for name, part in read_results().items() if name in ("cases", "kernels")}
    _write(run | kept)


def write_part(name: str, part: dict[str, Any]) -> None:
    """Replace one part of the results."""
    _write(read_results() | {name: part})


def read_results() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(JSON_FILE.read_text()) if JSON_FILE.exists() else {}
    return results


def markdown(results: dict[str, Any]) -> str:
    sections = ["# Results", *_run_sections(results)] if "contestants" in results else ["# Results"]
    if "cases" in results:
        sections += ["## Other cases", _cases_table(results["cases"])]
    if "kernels" in results:
        sections += ["## Kernels against their rooflines", _kernels_table(results["kernels"])]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _write(results: dict[str, Any]) -> None:
    JSON_FILE.write_text(json.dumps(results, indent=1) + "\n")
    MARKDOWN_FILE.write_text(markdown(results))
    if "contestants" in results:
        PLOT_FILE.write_text(bars_svg(_bars(results)))


def _run_sections(results: dict[str, Any]) -> list[str]:
    rates = results["rates"]
    return [
        INTRODUCTION.format(**results["machine"], commit=results["commit"][:12]),
        f"Measured in this run: {rates['read_bytes'] / 1e9:.1f} GB/s read from memory, "
        f"{rates['bf16_flops'] / 1e9:.0f} GFLOP/s in bfloat16 and {rates['fp32_flops'] / 1e9:.0f} in float32 matrices "
        "(medians; `benchmarks/machine.py` says how).",
        "![Output tokens per second](results.svg)",
        "## What it must reach",
        _targets_table(results),
        "## Figures",
        f"Median (smallest to largest) of {len(results['rounds'])} rounds. Floors are arithmetic "
        "(`benchmarks/floors.py`): bytes over the measured bandwidth or operations over the measured matrix rate.",
        _speed_table(results),
        _latency_table(results),
        "## Contestants",
        _contestants_table(results),
    ]


def _targets_table(results: dict[str, Any]) -> str:
    ratios = results["ratios"] | results.get("cases", {}).get("ratios", {})
    rows = []
    for target in TARGETS:
        value = ratios.get(target.ratio)
        verdict = "not measured" if value is None else "yes" if target.is_met(value) else "no"
        shown = "" if value is None else f"{value:.2f}"
        rows.append([target.title, f"`{target.ratio}`", target.text, shown, verdict])
    return _table(["what", "ratio", "target", "measured", "reached"], rows, numbers=(3,))


def _speed_table(results: dict[str, Any]) -> str:
    rows = []
    for workload in SPEED_WORKLOADS:
        for name, spread in _figures(results, workload, SPEED):
            rows.append([WORKLOADS[workload].title, name, _spread(spread)])
        floor = results["floors"].get(f"{workload}_tokens_per_s")
        if floor is not None and _figures(results, workload, SPEED):
            rows.append([WORKLOADS[workload].title, "floor", f"{floor:.0f}"])
    return _table(["workload", "contestant", "output tokens/s"], rows, numbers=(2,))


def _latency_table(results: dict[str, Any]) -> str:
    rows = []
    for workload in ("itl1", "served_s64"):
        first = dict(_figures(results, workload, "first_token_ms"))
        for name, spread in _figures(results, workload, LATENCY):
            rows.append([WORKLOADS[workload].title, name, _spread(first[name]), _spread(spread)])
    rows.append([WORKLOADS["itl1"].title, "floor", "", f"{results['floors']['itl1_ms']:.1f}"])
    headers = ["workload", "contestant", "ms to the first token", "ms from token to token"]
    return _table(headers, rows, numbers=(2, 3))


def _contestants_table(results: dict[str, Any]) -> str:
    rows = []
    for name, facts in results["contestants"].items():
        state = f"{len(facts['errors'])} errors, see `results.json`" if facts["errors"] else "ran"
        state = state if facts["is_installed"] else "**not installed** (`make bench-peers`)"
        rows.append([name, *(str(facts.get(key) or "") for key in ("version", "backend", "threads")), state])
    return _table(["contestant", "version", "backend", "threads", ""], rows)


def _cases_table(cases: dict[str, Any]) -> str:
    return _table(["case", "figure"], [[case["name"], case["figure"]] for case in cases["figures"]])


def _kernels_table(kernels: dict[str, Any]) -> str:
    rows = [
        [row["kernel"], row["shape"], f"{row['us']:.1f}", f"{row['gb_per_s']:.1f}", f"{row['gflop_per_s']:.0f}",
         f"{row['of_roofline']:.0%}"]
        for row in kernels["rows"]
    ]  # fmt: skip
    rates = kernels["rates"]
    return (
        f"Of the `{kernels['backend']}` backend in bfloat16, on weights, pools and caches that no processor cache "
        f"holds; against {rates['read_bytes'] / 1e9:.1f} GB/s and {rates['bf16_flops'] / 1e9:.0f} GFLOP/s measured "
        "beside them. The roofline is the larger of bytes over bandwidth and operations over the matrix rate.\n\n"
        + _table(["kernel", "shape", "us", "GB/s", "GFLOP/s", "of its roofline"], rows, numbers=(2, 3, 4, 5))
    )


def _figures(results: dict[str, Any], workload: str, quantity: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        (name, facts["figures"][workload][quantity])
        for name, facts in results["contestants"].items()
        if quantity in facts["figures"].get(workload, {})
    ]


def _bars(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        WORKLOADS[workload].title: {name: spread["median"] for name, spread in _figures(results, workload, SPEED)}
        for workload in SPEED_WORKLOADS
        if _figures(results, workload, SPEED)
    }


def _spread(spread: dict[str, Any]) -> str:
    return f"{spread['median']:.1f} ({spread['smallest']:.1f} to {spread['largest']:.1f})"


def _table(headers: list[str], rows: list[list[str]], numbers: tuple[int, ...] = ()) -> str:
    rule = ["--:" if index in numbers else "---" for index in range(len(headers))]
    return "\n".join(f"| {' | '.join(row)} |" for row in [headers, rule, *rows])
