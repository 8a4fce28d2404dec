"""What crosses the process boundary, as plain values. Never pickle: `engine.frontend.wire` writes them.

Client -> engine: one `EngineCall`. Engine -> client: one `EngineEvent`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection
from loraplex.engine.outputs import ErrorInfo, RequestOutput
from loraplex.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One generation (n = 1) with everything the engine needs; no names, no SQL, no strings to tokenize."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    selection: LoraSelection = BASE
    tenant_id: str = ""
    cache_salt: bytes = b""
    priority_class: str = "normal"
    share: float = 1.0
    deadline_s: float | None = None  # seconds from arrival
    prefix_leader_id: str | None = None


@dataclass(frozen=True, slots=True)
class AbortRequests:
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Make resident now and answer when it is (or has failed); takes no lasting lease."""

    call_id: int
    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Forget slots and host copy of a digest once no request holds a lease or reference on it; then answer.

    Cached prefixes of the digest become unreachable by construction and are dropped from the block cache too.
    """

    call_id: int
    digest: str


@dataclass(frozen=True, slots=True)
class PinAdapter:
    """Never a victim from now on. Refused when the pins would leave no free slot in a space."""

    call_id: int
    ref: AdapterRef


@dataclass(frozen=True, slots=True)
class UnpinAdapter:
    call_id: int
    digest: str


@dataclass(frozen=True, slots=True)
class GetIntegrity:
    call_id: int


EngineCall = GenerateRequest | AbortRequests | LoadAdapter | UnloadAdapter | PinAdapter | UnpinAdapter | GetIntegrity


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, in bytes."""

    budget_bytes: int
    weights_bytes: int
    slots_bytes: int
    peak_activation_bytes: int
    kv_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The first event of an engine: it is ready, and this is what it is."""

    backend: str
    device: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    num_slots: int  # in each space
    slot_rank: int
    max_lora_rank: int  # effective
    num_threads: int
    vocab_size: int
    memory: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentAdapter:
    digest: str
    num_attention_slots: int
    num_mlp_slots: int
    leases: int
    pinned: bool
    is_loading: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and running totals, sent after a step at most every 100 ms, and at once when the engine goes idle."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_adapter: int = 0
    num_blocks: int = 0
    num_blocks_used: int = 0  # held by requests
    num_blocks_cached: int = 0  # free to take, and still a prefix
    num_slots: int = 0
    num_attention_slots_used: int = 0
    num_mlp_slots_used: int = 0
    total_steps: int = 0
    total_replayed_steps: int = 0  # from a recorded graph
    total_fallbacks: dict[str, int] = field(default_factory=dict)  # kernel calls that took the reference's way
    total_preemptions: int = 0
    total_prompt_tokens: int = 0
    total_cached_tokens: int = 0
    total_output_tokens: int = 0
    total_adapter_loads: int = 0
    total_adapter_evictions: int = 0
    resident: tuple[ResidentAdapter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegrityReport:
    """Everything that must be nothing when nobody is served, and the faults that the checks found."""

    num_requests: int
    num_blocks_in_use: int
    num_leases: int
    num_references: int
    num_pending_loads: int
    faults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputBatch:
    outputs: list[RequestOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReply:
    """Answer to a call with a `call_id`; exactly one of `error` and success."""

    call_id: int
    error: ErrorInfo | None = None
    integrity: IntegrityReport | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """The engine could not start, or its loop raised: the last event before it exits."""

    error: ErrorInfo
    last_request_ids: list[str]


EngineEvent = EngineInfo | EngineStats | OutputBatch | CallReply | EngineFailed
