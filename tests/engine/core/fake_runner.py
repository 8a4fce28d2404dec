"""A model without tensors: each token depends on all before it, so a mix-up of KV or adapters shows in the output."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.engine.scheduler_output import (
    RequestResult,
    RunnerOutput,
    RunnerTotals,
    ScheduledRequest,
    SchedulerOutput,
)
from tests.engine.core.fake_adapters import FakeAdapters

VOCAB_SIZE = 97
POISON = object()


def chain_of(selection_digest: bytes, salt: bytes, token_ids: Sequence[int]) -> Iterator[int]:
    """What the KV at each position stands for: the tokens so far, the selection and the tenant's salt."""
    link = zlib.crc32(selection_digest + b"|" + salt)
    for token_id in token_ids:
        link = hash((link, token_id))
        yield link


def next_token(link: int, seed: int) -> int:
    return hash((link, seed)) % VOCAB_SIZE


def prompt_logprob(link: int, token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id=token_id, logprob=-float(link % 1000), rank=1)


@dataclass
class FakeRunner:
    """Computes steps and asserts that each reads only what was written for the same prefix.

    Requests in `non_finite` produce NaN as soon as they have as many output tokens as it says.
    """

    block_size: int
    adapters: FakeAdapters | None = None  # to look up what the slots hold
    non_finite: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv: dict[tuple[int, int], object] = {}  # (block, offset) -> link, or POISON
        self.steps: list[SchedulerOutput] = []
        self.num_tokens: list[dict[str, int]] = []  # of each step: tokens per request

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.steps.append(output)
        self.num_tokens.append({entry.request.request_id: entry.num_tokens for entry in output.scheduled})
        for block_id in output.blocks_to_zero:
            for offset in range(self.block_size):
                self.kv.pop((block_id, offset), None)
        self._check_writes(output)
        return RunnerOutput(results=tuple(self._compute(entry) for entry in output.scheduled))

    def totals(self) -> RunnerTotals:
        return RunnerTotals()

    def _check_writes(self, output: SchedulerOutput) -> None:
        """A block that one entry writes is in no other entry's table."""
        order = [entry.num_tokens > 1 for entry in output.scheduled]
        assert order == sorted(order), "decodes come first"
        tables = {entry.request.request_id: set(entry.request.block_ids) for entry in output.scheduled}
        for entry in output.scheduled:
            request = entry.request
            first, last = request.num_computed_tokens, request.num_computed_tokens + entry.num_tokens - 1
            written = set(request.block_ids[first // self.block_size : last // self.block_size + 1])
            for other_id, table in tables.items():
                assert other_id == request.request_id or not written & table, "a shared block is written"

    def _compute(self, entry: ScheduledRequest) -> RequestResult:
        request, start = entry.request, entry.request.num_computed_tokens
        self._check_slots(entry)
        links = list(chain_of(request.selection.digest, request.cache_salt, request.token_ids))
        for position in range(start):
            assert self.kv[self._place(request, position)] == links[position], "foreign or stale KV is read"
        for position in range(start, start + entry.num_tokens):
            place = self._place(request, position)
            assert self.kv.get(place) is not POISON, "a block with NaN was not zeroed"
            self.kv[place] = links[position]
        if self._is_poisoned(request):
            for block_id in request.block_ids[start // self.block_size :]:
                for offset in range(self.block_size):
                    self.kv[block_id, offset] = POISON
            return RequestResult(request_id=request.request_id, is_finite=False)
        return self._result(entry, links)

    def _result(self, entry: ScheduledRequest, links: list[int]) -> RequestResult:
        request, start = entry.request, entry.request.num_computed_tokens
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if request.wants_prompt_logprobs:
            stop = min(start + entry.num_tokens, request.num_prompt_tokens - 1)
            prompt_logprobs = tuple(prompt_logprob(links[p], request.token_ids[p + 1]) for p in range(start, stop))
        token_id = next_token(links[-1], request.seed) if entry.is_sampled else None
        return RequestResult(request_id=request.request_id, token_id=token_id, prompt_logprobs=prompt_logprobs)

    def _is_poisoned(self, request: Request) -> bool:
        return (
            self.non_finite.get(request.request_id, request.max_tokens)
            <= request.num_output_tokens
            < (request.max_tokens)
        )

    def _check_slots(self, entry: ScheduledRequest) -> None:
        selection = entry.request.selection
        if selection.is_base:
            assert entry.slots is None
            return
        assert entry.slots is not None
        if self.adapters is None:
            return
        wanted_attention = [(p.ref.digest, p.weight) for p in selection.parts for _ in range(p.ref.num_attention_slots)]
        wanted_mlp = [(p.ref.digest, p.weight) for p in selection.parts for _ in range(p.ref.num_mlp_slots)]
        attention = [(self.adapters.digest_in(s, is_attention=True), weight) for s, weight in entry.slots.attention]
        mlp = [(self.adapters.digest_in(s, is_attention=False), weight) for s, weight in entry.slots.mlp]
        assert (attention, mlp) == (wanted_attention, wanted_mlp), "a slot holds another adapter"

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        return request.block_ids[position // self.block_size], position % self.block_size
