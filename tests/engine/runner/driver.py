"""A schedule for the runner's tests: every unfinished request computes up to `chunk_size` tokens in each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.engine.runner.decode_graphs import DecodeGraphs
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.scheduler_output import RequestResult, ScheduledRequest, SchedulerOutput
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots

BLOCK_SIZE = 4
NUM_BLOCKS = 400


@dataclass
class World:
    """A runner over caches that hold NaN wherever nothing was written, and the blocks not yet given away."""

    model: DecoderModel
    kv_caches: list[KVCache]
    runner: ModelRunner
    free_blocks: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))

    @classmethod
    def over(
        cls,
        model: DecoderModel,
        pools: LoRAPools | None = None,
        *,
        make_graphs: Callable[[list[KVCache]], DecodeGraphs] | None = None,
    ) -> World:
        kv_caches = model.allocate_kv_caches(NUM_BLOCKS, BLOCK_SIZE)
        for cache in kv_caches:
            cache.key.fill_(torch.nan)
            cache.value.fill_(torch.nan)
        graphs = None if make_graphs is None else make_graphs(kv_caches)
        return cls(model, kv_caches, ModelRunner(model, kv_caches, pools, block_size=BLOCK_SIZE, graphs=graphs))

    def schedule(
        self, requests: Sequence[Request], chunk_size: int, slots: Mapping[Request, SelectionSlots]
    ) -> SchedulerOutput:
        entries = []
        for request in requests:
            num_tokens = min(chunk_size, request.num_tokens_to_compute)
            end = request.num_computed_tokens + num_tokens
            while len(request.block_ids) * BLOCK_SIZE < end:
                request.block_ids.append(self.free_blocks.pop())
            entries.append(ScheduledRequest(request=request, num_tokens=num_tokens, slots=slots.get(request)))
        return SchedulerOutput(scheduled=tuple(sorted(entries, key=lambda entry: entry.num_tokens > 1)))

    def step(
        self, requests: Sequence[Request], chunk_size: int = 1000, slots: Mapping[Request, SelectionSlots] | None = None
    ) -> dict[Request, RequestResult]:
        """One step of all `requests`; their state moves on as the scheduler would move it."""
        output = self.schedule(requests, chunk_size, slots or {})
        results = self.runner.execute(output).results
        for entry, result in zip(output.scheduled, results, strict=True):
            assert result.request_id == entry.request.request_id
            entry.request.num_computed_tokens += entry.num_tokens
            if result.token_id is not None:
                entry.request.token_ids.append(result.token_id)
        return {entry.request: result for entry, result in zip(output.scheduled, results, strict=True)}

    def run(
        self,
        requests: Sequence[Request],
        *,
        chunk_size: int = 1000,
        slots: Mapping[Request, SelectionSlots] | None = None,
        after_step: Callable[[], None] = lambda: None,
    ) -> dict[Request, Answer]:
        """Steps until every request has `max_tokens` of output or is not finite."""
        answers = {request: Answer() for request in requests}
        while running := [request for request in requests if answers[request].is_running(request)]:
            for request, result in self.step(running, chunk_size, slots).items():
                answers[request].take(result)
            after_step()
        return answers


@dataclass
class Answer:
    """All that a runner said of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    is_finite: bool = True

    def is_running(self, request: Request) -> bool:
        is_done = len(self.token_ids) >= request.max_tokens and request.num_computed_tokens >= request.num_prompt_tokens
        return self.is_finite and not is_done

    def take(self, result: RequestResult) -> None:
        self.is_finite = result.is_finite
        self.prompt_logprobs += result.prompt_logprobs
        if result.token_id is not None:
            self.token_ids.append(result.token_id)
        if result.logprobs is not None:
            self.logprobs.append(result.logprobs)


def load(folder: Path) -> DecoderModel:
    device = torch.device("cpu")
    return load_model(
        folder,
        read_model_config(folder),
        backend=create_backend("reference", device),
        dtype=torch.float32,
        device=device,
    )


def create_pools(model: DecoderModel, *, num_slots: int = 3, slot_rank: int = 2) -> LoRAPools:
    config, generator = model.config, torch.Generator().manual_seed(3)
    sizes = {
        Projection.Q: (config.hidden_size, config.q_size),
        Projection.K: (config.hidden_size, config.kv_size),
        Projection.V: (config.hidden_size, config.kv_size),
        Projection.O: (config.q_size, config.hidden_size),
        Projection.GATE: (config.hidden_size, config.intermediate_size),
        Projection.UP: (config.hidden_size, config.intermediate_size),
        Projection.DOWN: (config.intermediate_size, config.hidden_size),
    }

    def random(size: int) -> Tensor:
        return torch.randn(config.num_layers, num_slots, slot_rank, size, generator=generator) * 0.2

    return LoRAPools(
        lora_a={projection: random(size) for projection, (size, _) in sizes.items()},
        lora_b={projection: random(size) for projection, (_, size) in sizes.items()},
        scaling=torch.ones(config.num_layers, len(Projection), num_slots),
    )
