"""What every contestant is told, and how its process reports: a JSON line on standard output for each workload.

Standard library only: a peer's own Python runs it.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.request_set import BenchRequest, warm_up_set
from benchmarks.workloads import WORKLOADS, Workload

REPORT_PREFIX = "REPORT "


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process is to measure; all workloads have the same number of adapters."""

    model: Path  # a folder as transformers reads it
    adapters: Path  # a folder with one folder per adapter
    gguf: Path  # a folder with the same weights and adapters as GGUF files
    peer: Path | None  # where the peer is installed
    workloads: list[Workload]

    @property
    def num_adapters(self) -> int:
        return self.workloads[0].num_adapters

    @property
    def num_streams(self) -> int:
        """Most requests that are open at once."""
        return max(workload.num_streams or workload.num_requests for workload in self.workloads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Output tokens of all requests; for streams also seconds to the first token and between tokens, per request."""

    num_tokens: int
    first_token_s: list[float] = field(default_factory=list)
    inter_token_s: list[float] = field(default_factory=list)


class Contestant(Protocol):
    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        """Answer all of them."""
        ...

    def facts(self) -> dict[str, Any]:
        """Version, backend, threads: what the reader of a figure needs to know."""
        ...

    def close(self) -> None: ...


def run_as_main(make: Callable[[Job], Contestant]) -> None:
    """Build, warm up with short requests (one per adapter), then time each workload once and report it."""
    job = _parse_job()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))  # so that `close` ends what it started
    started = time.perf_counter()
    contestant = make(job)
    try:
        contestant.run(warm_up_set(job.num_adapters), None)
        ready_s = time.perf_counter() - started
        for workload in job.workloads:
            report = _measure(contestant, workload) | {"ready_s": ready_s} | contestant.facts()
            sys.stdout.write(f"\n{REPORT_PREFIX}{json.dumps(report)}\n")
            sys.stdout.flush()
    finally:
        contestant.close()


def _parse_job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--peer", type=Path)
    parser.add_argument("--workloads", nargs="+", type=WORKLOADS.__getitem__, required=True)
    return Job(**vars(parser.parse_args()))


def _measure(contestant: Contestant, workload: Workload) -> dict[str, Any]:
    requests = workload.requests()
    started = time.perf_counter()
    outcome = contestant.run(requests, workload.num_streams)
    seconds = time.perf_counter() - started
    expected = sum(request.output_tokens for request in requests)
    if outcome.num_tokens != expected:
        raise RuntimeError(f"{workload.name}: {outcome.num_tokens} output tokens instead of {expected}")
    report: dict[str, Any] = {
        "workload": workload.name,
        "seconds": seconds,
        "tokens_per_s": outcome.num_tokens / seconds,
    }
    for name, values in (("first_token_ms", outcome.first_token_s), ("inter_token_ms", outcome.inter_token_s)):
        if values:
            report[name] = 1000 * statistics.median(values)
    return report
