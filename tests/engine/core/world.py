"""An engine core with a fake runner and fake adapters, and what came out of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection, SelectionPart
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore, create_engine_core
from loraplex.engine.core.request_intake import ModelLimits
from loraplex.engine.messages import CallReply, EngineCall, GenerateRequest
from loraplex.engine.outputs import FinishReason, RequestOutput
from loraplex.engine.sampling_params import SamplingParams
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.fake_runner import VOCAB_SIZE, FakeRunner, chain_of, next_token

EOS = 0


def ref(name: str, *, attention: int = 1, mlp: int = 1) -> AdapterRef:
    digest = hashlib.sha256(f"{name} {attention} {mlp}".encode()).hexdigest()
    return AdapterRef(digest, attention, mlp)


def select(*names: str) -> LoraSelection:
    """A selection of one-slot adapters; several make a mix."""
    return LoraSelection.of(SelectionPart(ref(name), 1.0 / len(names)) for name in names)


def make_request(
    request_id: str,
    prompt: Sequence[int] | int = 4,
    *,
    max_tokens: int | None = 4,
    selection: LoraSelection = BASE,
    salt: bytes = b"",
    leader: str | None = None,
    **params: Any,
) -> GenerateRequest:
    """A greedy request; `prompt` is its tokens or their number. The end of text is ignored unless params say so."""
    tokens = [token % VOCAB_SIZE for token in (range(1, prompt + 1) if isinstance(prompt, int) else prompt)]
    settings = {"max_tokens": max_tokens, "seed": 5, "temperature": 0.0, "ignore_eos": True} | params
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(**settings),
        selection=selection,
        cache_salt=salt,
        prefix_leader_id=leader,
    )


def solo_tokens(request: GenerateRequest, max_model_len: int = 1 << 20) -> list[int]:
    """What the request answers when nobody else is there and nothing is cached."""
    params = request.sampling_params
    tokens = list(request.prompt_token_ids)
    room = max_model_len - len(tokens)
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    output: list[int] = []
    while len(output) < (room if params.max_tokens is None else min(room, params.max_tokens)):
        *_, link = chain_of(request.selection.digest, request.cache_salt, tokens)
        output.append(next_token(link, params.seed or 0))
        tokens.append(output[-1])
        if output[-1] in stops:
            break
    return output


class World:
    """Steps an engine core, checks its integrity after each step, and keeps all outputs by request."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 128,
        enable_prefix_caching: bool = True,
        adapters: FakeAdapters | None = None,
    ) -> None:
        config = EngineConfig(
            model="",
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.adapters = adapters or FakeAdapters()
        self.runner = FakeRunner(block_size, self.adapters)
        self.limits = ModelLimits(max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset({EOS}))
        self.core: EngineCore = create_engine_core(
            config=config, num_blocks=num_blocks, limits=self.limits, runner=self.runner, adapters=self.adapters
        )
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.replies: dict[int, CallReply] = {}
        self.num_steps = 0

    def add(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.core.add_request(request)

    def handle(self, call: EngineCall) -> None:
        self.core.handle(call)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self._collect(self.core.step())
            assert self.core.integrity().faults == ()
            self.num_steps += 1

    def run(self, max_steps: int = 2000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            if not self.core.has_work:
                self._collect([])
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def run_until_started(self, request_id: str, max_steps: int = 2000) -> int:
        """Number of steps until the request has its first output."""
        for count in range(max_steps):
            if request_id in self.outputs:
                return count
            self.step()
        raise AssertionError(f"{request_id} did not start within {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def finish_reasons(self, request_id: str) -> list[FinishReason]:
        reasons = (output.finish_reason for output in self.outputs.get(request_id, []))
        return [reason for reason in reasons if reason is not None]

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]

    def cached_tokens(self, request_id: str) -> int:
        return self.outputs[request_id][0].num_cached_tokens

    def assert_nothing_left(self) -> None:
        report = self.core.integrity()
        assert report.faults == ()
        held = (report.num_requests, report.num_blocks_in_use, report.num_leases, report.num_references)
        assert held == (0, 0, 0, 0)
        assert not self.core.has_work

    def _collect(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        for reply in self.core.take_replies():
            assert reply.call_id not in self.replies, "a call was answered twice"
            self.replies[reply.call_id] = reply
