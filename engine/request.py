"""One generation: token ids, counters, selection. Plain data; only the scheduler changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from loraplex.adapters.ref import LoraSelection
from loraplex.engine.outputs import FinishReason
from loraplex.engine.sampling_params import SamplingParams


class RequestStatus(Enum):
    WAITING = auto()
    WAITING_FOR_ADAPTER = auto()  # holds leases on slots that are being loaded; no KV blocks
    RUNNING = auto()
    PREEMPTED = auto()  # waits like WAITING, and has output tokens to recompute
    FINISHED_STOPPED = auto()
    FINISHED_LENGTH = auto()
    FINISHED_ABORTED = auto()
    FINISHED_FAILED = auto()

    @property
    def is_finished(self) -> bool:
        return self.value >= RequestStatus.FINISHED_STOPPED.value

    @property
    def finish_reason(self) -> FinishReason | None:
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_FAILED: FinishReason.ERROR,
}


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """State of one generation inside the engine.

    The opaque tenant fields (`tenant_id`, `cache_salt`, `priority_class`, `share`, `deadline`) come from the
    platform; the engine never interprets more of them than its policies need.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved: at least 0, fits max_model_len
    seed: int  # resolved: never None
    eos_token_ids: frozenset[int]
    selection: LoraSelection
    arrival_time: float  # time.monotonic seconds
    tenant_id: str = ""
    cache_salt: bytes = field(default=b"", repr=False)  # a secret: never logged
    priority_class: str = "normal"
    share: float = 1.0
    deadline: float | None = None
    prefix_leader_id: str | None = None  # starts when that request has hashed its prompt's full blocks (n > 1)

    arrival_index: int = 0  # order of acceptance, given by the scheduler
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt and output
    num_computed_tokens: int = 0  # tokens whose KV exists
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache when first admitted
    num_preemptions: int = 0
    block_ids: list[int] = field(default_factory=list)  # the block_table
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks, in order

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.sampling_params.prompt_logprobs is not None
