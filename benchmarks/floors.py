"""The least that a workload can take, by arithmetic: bytes over bandwidth, operations over the matrix rate.

A step takes the larger of the two. All prompts are computed at once, then OUTPUT_TOKENS - 1 steps decode everybody.
Weights, KV cache and adapters are bfloat16, read once per step.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import Rates
from benchmarks.request_set import OUTPUT_TOKENS, BenchRequest, adapter_rank
from benchmarks.workloads import Workload

BF16_BYTES = 2
NUM_DECODE_STEPS = OUTPUT_TOKENS - 1  # a prompt's own step gives the first token


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Numbers of values, of a decoder with tied embeddings."""

    weights: int  # all that a step multiplies, the head included
    head: int
    kv_per_token: int
    per_rank: int  # of A and B of every projection of every layer

    @classmethod
    def of(cls, folder: Path) -> ModelSize:
        """From `config.json` alone; every layer has seven projections and two norms."""
        config = json.loads((folder / "config.json").read_text())
        hidden, intermediate = config["hidden_size"], config["intermediate_size"]
        head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
        q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
        shapes = [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden)]
        shapes += [(hidden, intermediate), (hidden, intermediate), (intermediate, hidden)]
        layers, head = config["num_hidden_layers"], config["vocab_size"] * hidden
        return cls(
            weights=layers * (sum(a * b for a, b in shapes) + 2 * hidden) + hidden + head,
            head=head,
            kv_per_token=2 * layers * kv,
            per_rank=layers * sum(a + b for a, b in shapes),
        )


def decode_step_s(model: ModelSize, rates: Rates) -> float:
    """One row, a short context: its weights."""
    return BF16_BYTES * model.weights / rates.read_bytes


def base_s(model: ModelSize, rates: Rates, workload: Workload) -> float:
    requests = workload.requests()
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    prompt_flops = 2 * (num_prompt_tokens * (model.weights - model.head) + len(requests) * model.head)
    context = num_prompt_tokens + len(requests) * OUTPUT_TOKENS // 2  # in the middle of the answers
    step_bytes = BF16_BYTES * (model.weights + context * model.kv_per_token)
    step_flops = 2 * len(requests) * model.weights
    return _seconds(rates, BF16_BYTES * model.weights, prompt_flops) + NUM_DECODE_STEPS * _seconds(
        rates, step_bytes, step_flops
    )


def lora_s(model: ModelSize, rates: Rates, workload: Workload) -> float:
    """What the adapters add: each one's bytes once per step, each token's operations by its adapter's rank."""
    requests = workload.requests()
    used = {request.adapter(workload.num_adapters) for request in requests}
    step_bytes = BF16_BYTES * model.per_rank * sum(map(adapter_rank, used))
    prompt_flops = sum(2 * model.per_rank * len(r.prompt_token_ids) * _rank(r, workload) for r in requests)
    step_flops = sum(2 * model.per_rank * _rank(request, workload) for request in requests)
    return _seconds(rates, step_bytes, prompt_flops) + NUM_DECODE_STEPS * _seconds(rates, step_bytes, step_flops)


def _rank(request: BenchRequest, workload: Workload) -> int:
    return adapter_rank(request.adapter(workload.num_adapters))


def _seconds(rates: Rates, num_bytes: float, flops: float) -> float:
    return max(num_bytes / rates.read_bytes, flops / rates.bf16_flops)
