"""`make bench`: our engine, our server and their peers on the same requests, in turn, each in a process of its own.

    python -m benchmarks.run [--rounds N] [--workloads ...] [--contestants ...] [--peers DIR]

Only ratios between figures of one run mean anything: these machines are noisy, so everybody runs in every round, and
medians of at least three rounds are compared. Whatever is measured is written to `benchmarks/results.json` and
`benchmarks/RESULTS.md` after every round; a contestant that fails or is not installed is recorded as such and does
not end the run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant, contestants
from benchmarks.machine import Rates
from benchmarks.materials import Materials, prepare_materials
from benchmarks.peers import PEERS_DIR
from benchmarks.process import run_contestant, run_module
from benchmarks.report import MARKDOWN_FILE, write_results
from benchmarks.results import Round, summarise
from benchmarks.workloads import GROUPS, WORKLOADS, Workload


def main() -> None:
    arguments = _parse_arguments()
    everybody = contestants(arguments.peers.resolve())
    taking_part = [each for each in everybody if each.name in (arguments.contestants or [c.name for c in everybody])]
    materials = prepare_materials(taking_part, [WORKLOADS[name] for name in arguments.workloads])
    for contestant in taking_part:
        if not contestant.is_installed:
            _say(f"NOT INSTALLED: {contestant.name}; run `make bench-peers`. Ratios to the best peer will be null.")
    rounds: list[Round] = []
    for number in range(1, arguments.rounds + 1):
        started = time.monotonic()
        rounds.append(_run_round(number, taking_part, arguments.workloads, materials))
        write_results(summarise(rounds, taking_part, materials.model))
        _say(f"round {number} of {arguments.rounds}: {time.monotonic() - started:.0f} s, written to {MARKDOWN_FILE}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--contestants", nargs="+", choices=[each.name for each in contestants(PEERS_DIR)])
    parser.add_argument("--peers", type=Path, default=PEERS_DIR, help="where `make bench-peers` installed them")
    return parser.parse_args()


def _run_round(number: int, taking_part: Sequence[Contestant], names: Sequence[str], materials: Materials) -> Round:
    rates = _machine_rates()
    reports: list[dict[str, Any]] = []
    errors: list[dict[str, str]] = []
    for contestant, workloads in _turns(taking_part, names):
        try:
            found = run_contestant(contestant, workloads, materials)
        except RuntimeError as error:
            _say(f"round {number} {contestant.name} FAILED on {', '.join(w.name for w in workloads)}: {error}")
            errors.append({"contestant": contestant.name, "error": str(error)})
            continue
        for report in found:
            _say(f"round {number} {report['workload']:10} {contestant.name:18} {report['tokens_per_s']:7.1f} tokens/s")
            reports.append({"contestant": contestant.name, "product": contestant.product, **report})
    return Round(rates=rates, reports=reports, errors=errors)


def _turns(taking_part: Sequence[Contestant], names: Sequence[str]) -> Iterator[tuple[Contestant, list[Workload]]]:
    """Who runs what, in order (see GROUPS)."""
    for number, group in enumerate(GROUPS):
        for contestant in taking_part if number else reversed(taking_part):
            workloads = [each for each in group if each.name in names and each in contestant.workloads]
            if workloads and contestant.is_installed:
                yield contestant, workloads


def _machine_rates() -> Rates:
    return Rates(**json.loads(run_module("benchmarks.machine")))


def _say(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
