"""The one set of requests and adapters that everybody in a run works on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPT_LENGTHS = (32, 128, 512)
OUTPUT_TOKENS = 64
ADAPTER_RANKS = (8, 16, 32, 64)
SEED = 20261129


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt of plain token ids, answered greedily with exactly OUTPUT_TOKENS tokens."""

    prompt_token_ids: list[int]
    index: int

    def adapter(self, num_adapters: int) -> str:
        return adapter_name(self.index % num_adapters)


def request_set(num_requests: int) -> list[BenchRequest]:
    """The first `num_requests` of one endless seeded sequence."""
    rng = random.Random(SEED)
    return [
        BenchRequest([rng.randrange(1000, 40000) for _ in range(rng.choice(PROMPT_LENGTHS))], index)
        for index in range(num_requests)
    ]


def adapter_name(index: int) -> str:
    return f"a{index:02d}"


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
        rank = ADAPTER_RANKS[index % len(ADAPTER_RANKS)]
        config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules="all-linear")
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
        with torch.no_grad():
            for name, parameter in peft_model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.02)
        peft_model.save_pretrained(str(folder / adapter_name(index)))
        model = peft_model.unload()
