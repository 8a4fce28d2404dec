"""`make bench-cases`: figures beside throughput, most of them cases that users of other servers report.

    python -m benchmarks.cases [--pairs N]

Starts real servers on this machine, prints a line for every figure and adds them all to `benchmarks/RESULTS.md`.
Nothing is asserted: these machines are noisy, and the tests assert the counts behind the times.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.case import Case
from benchmarks.cold_load_case import GapsBetweenTokens, measure_gaps
from benchmarks.materials import DEMO_ADAPTERS, demo_model
from benchmarks.report import write_part
from benchmarks.request_set import ADAPTER_RANKS, NUM_ADAPTERS, adapter_name, adapter_rank, ensure_adapters
from benchmarks.resident_case import compare_resident_with_none
from benchmarks.results import current_commit
from benchmarks.upkeep_cases import upkeep_cases
from loraplex.adapters.slot_tensors import slot_bytes
from loraplex.engine.models.base_spec import build_base_spec
from tests.e2e.server import running_server

SLOT_RANK = 8
NUM_STARTS = 3
NUM_COLD_ADAPTERS = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=25, help="of runs with and without resident adapters; at least 9")
    num_pairs = max(9, parser.parse_args().pairs)
    model = demo_model()
    ensure_adapters(model, DEMO_ADAPTERS, NUM_ADAPTERS)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in _all_cases(model, Path(scratch), num_pairs):
            cases.append(case)
            sys.stdout.write(f"{case.name}: {case.figure}\n")
            sys.stdout.flush()
            _write(cases)


def _write(cases: Sequence[Case]) -> None:
    """All so far: a case that fails later takes nothing away."""
    ratios = {name: value for case in cases for name, value in case.ratios.items()}
    write_part("cases", {"commit": current_commit(), "ratios": ratios, "figures": [asdict(case) for case in cases]})


def _all_cases(model: Path, scratch: Path, num_pairs: int) -> Iterator[Case]:
    yield start_to_first_token(model, scratch / "start")
    yield cold_adapter_arrives(model, scratch / "cold")
    yield resident_adapters(model, num_pairs)
    yield adapter_memory(model)
    yield from upkeep_cases(scratch)


def start_to_first_token(model: Path, folder: Path) -> Case:
    """Seconds from `loraplex serve` on the demo model to the first answered token."""
    ready, first = [], []
    for number in range(NUM_STARTS):
        started = time.perf_counter()
        with running_server(model, folder / str(number), "--dtype", "bfloat16") as server:
            ready.append(time.perf_counter() - started)
            client = server.create_tenant("first")
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            client.post("/v1/chat/completions", json=body).raise_for_status()
            first.append(time.perf_counter() - started)
    figure = f"ready {statistics.median(ready):.1f} s, first token {statistics.median(first):.1f} s (of {NUM_STARTS})"
    return Case("start of serve on the demo model", figure, {"start_to_first_token_s": statistics.median(first)})


def cold_adapter_arrives(model: Path, folder: Path) -> Case:
    """Four streams decode on the base while adapters of rank 64 come that nobody used before."""
    largest_rank = [index for index in range(NUM_ADAPTERS) if adapter_rank(index) == max(ADAPTER_RANKS)]
    names = [adapter_name(index) for index in largest_rank[:NUM_COLD_ADAPTERS]]
    flags = ("--dtype", "bfloat16", "--max-model-len", "4096", "--kv-cache-memory-gib", "1")
    with running_server(model, folder, *flags, env={"OMP_NUM_THREADS": "2"}) as server:
        client = server.create_tenant("cold")
        for name in names:
            server.upload("cold", name, DEMO_ADAPTERS / name)
        port, key = int(server.url.rpartition(":")[2]), client.headers["authorization"].removeprefix("Bearer ")

        def load(name: str) -> None:
            client.post(f"/api/v1/tenants/cold/adapters/{name}/versions/1/load").raise_for_status()

        half = len(names) // 2
        gaps = asyncio.run(measure_gaps(port, key, to_load=names[:half], to_ask=names[half:], load=load))
    ratios = {
        "cold_load_gap_over_p99": max(gaps.load) / gaps.steady_p99,
        "cold_request_gap_over_p99": max(gaps.cold_request) / gaps.steady_p99,
    }
    return Case("a cold adapter of rank 64 while 4 streams decode", _gap_figure(gaps), ratios)


def _gap_figure(gaps: GapsBetweenTokens) -> str:
    def shown(seconds: list[float]) -> str:
        return ", ".join(f"{gap * 1000:.0f}" for gap in seconds)

    median, largest = statistics.median(gaps.steady), max(gaps.steady)
    return (
        f"gap between tokens: steady median {median * 1000:.1f} ms, P99 {gaps.steady_p99 * 1000:.1f}, largest "
        f"{largest * 1000:.1f}; largest while it is loaded {shown(gaps.load)} ms; while a request of 32 tokens waits "
        f"for it and starts {shown(gaps.cold_request)} ms; when such a request starts on the base "
        f"{shown(gaps.base_request)} ms"
    )


def resident_adapters(model: Path, num_pairs: int) -> Case:
    speeds = compare_resident_with_none(model, DEMO_ADAPTERS, num_pairs=num_pairs)
    low, high = speeds.interval
    return Case(
        "base-only traffic, 8 adapters resident, against an engine without LoRA",
        f"{speeds.median:.3f} of its speed (interval of the median {low:.3f} to {high:.3f}, {num_pairs} pairs)",
        {"resident_adapters_over_none": speeds.median},
    )


def adapter_memory(model: Path) -> Case:
    """Bytes of the slots that the 64 adapters take, over the bytes of A and B in their files."""
    per_slot = slot_bytes(build_base_spec(model), slot_rank=SLOT_RANK, dtype=torch.bfloat16)
    taken = sum(-(-adapter_rank(index) // SLOT_RANK) * per_slot for index in range(NUM_ADAPTERS))
    own = sum(_tensor_bytes(DEMO_ADAPTERS / adapter_name(index)) for index in range(NUM_ADAPTERS))
    return Case(
        "memory of 64 adapters in slots",
        f"{taken / NUM_ADAPTERS / 1e6:.1f} MB each, {own / NUM_ADAPTERS / 1e6:.1f} MB in their files",
        {"slot_bytes_over_rank_bytes": taken / own},
    )


def _tensor_bytes(adapter: Path) -> int:
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118  # it is no mapping


if __name__ == "__main__":
    main()
