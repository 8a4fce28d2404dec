"""Base-only traffic: an engine that holds 8 adapters against one that was built without LoRA, in interleaved pairs."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.request_set import BenchRequest, adapter_name, adapter_rank, single_stream_set, warm_up_set
from loraplex.engine import assembly
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.sampling_params import SamplingParams

NUM_ADAPTERS = 8
NUM_REQUESTS = 16
OUTPUT_TOKENS = 48
SLOT_RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSpeeds:
    """`ratios` of speed with resident adapters over speed without LoRA, one for each pair."""

    ratios: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def interval(self) -> tuple[float, float]:
        """Of the median, 95 % whatever the distribution: the order statistics that binomial tails leave."""
        ordered, count = sorted(self.ratios), len(self.ratios)
        left_out = 0
        while 2 * sum(math.comb(count, i) for i in range(left_out + 1)) <= 0.05 * 2**count:
            left_out += 1
        first = max(0, left_out - 1)
        return ordered[first], ordered[-1 - first]


def compare_resident_with_none(model: Path, adapters: Path, *, num_pairs: int) -> PairedSpeeds:
    """Both engines live in this process and take turns; which of them begins alternates."""
    resident, none = _engine_with_residents(model, adapters), _engine_without_lora(model)
    requests = single_stream_set(NUM_REQUESTS)  # short prompts: mostly steps of decoding
    for engine in (resident, none):
        _seconds(engine, requests)
    ratios = []
    for pair in range(num_pairs):
        if pair % 2:
            of_none, of_resident = _seconds(none, requests), _seconds(resident, requests)
        else:
            of_resident, of_none = _seconds(resident, requests), _seconds(none, requests)
        ratios.append(of_none / of_resident)
    return PairedSpeeds(ratios=ratios)


class _RunnerWithoutPools(ModelRunner):
    """No step of it can reach an adapter."""

    def __init__(self, model: Any, kv_caches: Any, pools: Any, **settings: Any) -> None:
        super().__init__(model, kv_caches, None, **settings)


def _engine_without_lora(model: Path) -> LLM:
    with patch.object(assembly, "ModelRunner", _RunnerWithoutPools):
        return _engine(model, adapters={}, adapter_slots=1)


def _engine_with_residents(model: Path, adapters: Path) -> LLM:
    names = [adapter_name(index) for index in range(NUM_ADAPTERS)]
    slots = sum(adapter_rank(index) // SLOT_RANK for index in range(NUM_ADAPTERS))
    engine = _engine(model, adapters={name: adapters / name for name in names}, adapter_slots=slots)
    used = warm_up_set(NUM_ADAPTERS)
    engine.generate([each.prompt_token_ids for each in used], SamplingParams(max_tokens=1), lora=names)
    return engine


def _engine(model: Path, *, adapters: dict[str, Path], adapter_slots: int) -> LLM:
    return LLM(
        model,
        adapters=adapters,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        lora_dtype="bfloat16",
        max_model_len=1024,
        adapter_slots=adapter_slots,
        slot_rank=SLOT_RANK,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
    )


def _seconds(engine: LLM, requests: list[BenchRequest]) -> float:
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    engine.generate([request.prompt_token_ids for request in requests], params)
    return time.perf_counter() - started
