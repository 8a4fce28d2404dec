"""The one set of requests and adapters that everybody in a run works on. Standard library only at import."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (32, 128, 512)
OUTPUT_TOKENS = 64
ADAPTER_RANKS = (8, 16, 32, 64)
NUM_ADAPTERS = 64
SEED = 20261129
NUM_MEASURED = 64  # requests that figures are taken from; what comes after them serves to warm up
WARM_UP_OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt of plain token ids, answered greedily with exactly `output_tokens` tokens."""

    prompt_token_ids: list[int]
    index: int
    output_tokens: int = OUTPUT_TOKENS

    def adapter(self, num_adapters: int) -> int:
        """Which of the adapters it asks for, in turn."""
        return self.index % num_adapters


def request_set(num_requests: int) -> list[BenchRequest]:
    """The first `num_requests` of one endless seeded sequence."""
    return list(itertools.islice(_endless(), num_requests))


def single_stream_set(num_requests: int) -> list[BenchRequest]:
    """Short prompts for one stream, none of them in the measured set: what a step costs is its weights."""
    return list(itertools.islice(_short_prompts(), num_requests))


def warm_up_set(num_adapters: int) -> list[BenchRequest]:
    """A short request for every adapter (two without any), none of them measured: caches of prompts stay cold."""
    prompts = itertools.islice(_short_prompts(), 16, None)
    count = max(2, num_adapters)
    return [BenchRequest(next(prompts).prompt_token_ids, i, WARM_UP_OUTPUT_TOKENS) for i in range(count)]


def adapter_name(index: int) -> str:
    return f"a{index:02d}"


def adapter_rank(index: int) -> int:
    return ADAPTER_RANKS[index % len(ADAPTER_RANKS)]


def ensure_adapters(model_dir: Path, folder: Path, num_adapters: int) -> None:
    """Write random adapters on all seven projections, ranks in turn from ADAPTER_RANKS, alpha = rank, bfloat16."""
    missing = [index for index in range(num_adapters) if not (folder / adapter_name(index)).exists()]
    if not missing:
        return
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for index in missing:
        torch.manual_seed(1000 + index)
        rank = adapter_rank(index)
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules="all-linear")
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
        peft_model.save_pretrained(str(folder / adapter_name(index)))
        model = peft_model.unload()


def _endless() -> Iterator[BenchRequest]:
    rng = random.Random(SEED)
    for index in itertools.count():
        length = rng.choice(PROMPT_LENGTHS)
        yield BenchRequest([rng.randrange(1000, 40000) for _ in range(length)], index)


def _short_prompts() -> Iterator[BenchRequest]:
    unmeasured = itertools.islice(_endless(), NUM_MEASURED, None)
    return (request for request in unmeasured if len(request.prompt_token_ids) == min(PROMPT_LENGTHS))
