"""What every contestant is told, and how its process reports: one JSON line on standard output."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.request_set import BenchRequest, request_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One workload: the first `num_requests` requests, each with its adapter when `num_adapters` > 0."""

    model: Path
    adapters: Path
    num_requests: int
    num_adapters: int
    backend: str  # of ours

    def requests(self) -> list[BenchRequest]:
        return request_set(self.num_requests)


class Contestant(Protocol):
    name: str

    def run(self, requests: list[BenchRequest]) -> int:
        """Answer all of them; return the number of output tokens."""
        ...

    def facts(self) -> dict[str, Any]:
        """Version, backend, threads: what the reader of a figure needs to know."""
        ...


def run_as_main(make: Callable[[Job], Contestant]) -> None:
    """Build, warm up with a single request, time one run of all, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--num-requests", type=int, required=True)
    parser.add_argument("--num-adapters", type=int, required=True)
    parser.add_argument("--backend", default="auto")
    job = Job(**vars(parser.parse_args()))
    contestant = make(job)
    contestant.run(job.requests()[:1])
    started = time.perf_counter()
    num_tokens = contestant.run(job.requests())
    seconds = time.perf_counter() - started
    report = {"name": contestant.name, "tokens_per_s": num_tokens / seconds, "seconds": seconds, **contestant.facts()}
    sys.stdout.write("\n" + json.dumps(report) + "\n")
