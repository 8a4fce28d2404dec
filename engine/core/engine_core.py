"""The engine's loop: advance adapters -> schedule -> execute -> update. Pure Python, one thread, never blocks
but in the runner.
"""

from __future__ import annotations

from typing import Protocol, assert_never

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.adapter_calls import AdapterCalls
from loraplex.engine.core.adapter_control import AdapterControl
from loraplex.engine.core.request_intake import ModelLimits, RequestIntake
from loraplex.engine.core.scheduler import Scheduler, create_scheduler
from loraplex.engine.messages import (
    AbortRequests,
    CallReply,
    EngineCall,
    EngineStats,
    GenerateRequest,
    GetIntegrity,
    IntegrityReport,
    LoadAdapter,
    PinAdapter,
    ResidentAdapter,
    UnloadAdapter,
    UnpinAdapter,
)
from loraplex.engine.outputs import ErrorInfo, FinishReason, RequestOutput
from loraplex.engine.scheduler_output import RunnerOutput, RunnerTotals, SchedulerOutput


class Runner(Protocol):
    """Computes one step. `engine.runner.model_runner.ModelRunner` fills it."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Results in the order of `output.scheduled`. An exception ends the engine."""
        ...

    def totals(self) -> RunnerTotals: ...


class EngineCore:
    """Everything between a token prompt and its tokens.

    Call `handle` (or `add_request` and `abort`) between steps, then `step` while `has_work`; each call returns the
    new outputs. A request that cannot be served ends with an output that says why; nothing here raises for it.
    """

    def __init__(self, *, scheduler: Scheduler, runner: Runner, adapters: AdapterControl, limits: ModelLimits) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._intake = RequestIntake(limits)
        self._calls = AdapterCalls(adapters, drop_cached=scheduler.drop_cached)
        self._replies: list[CallReply] = []
        self._refusals: list[RequestOutput] = []
        self._num_steps = 0
        self._is_stalled = False

    def step(self) -> list[RequestOutput]:
        self._advance_adapters()
        output = self.scheduler.schedule()
        results = self._execute(output) if output.scheduled else RunnerOutput()
        outputs = self._take_refusals() + self.scheduler.update(output, results)
        self._calls.start_loads(may_take_slots=not self.scheduler.reserves_slots)
        self._num_steps += bool(output.scheduled)
        self._is_stalled = not output.scheduled and not self._adapters.is_copying
        return outputs

    @property
    def has_work(self) -> bool:
        has_own = bool(self._refusals) or self._calls.has_pending
        return has_own or self.scheduler.has_work or self._adapters.has_pending_loads

    @property
    def is_stalled(self) -> bool:
        """True when the last step computed nothing: only loads are awaited, so the caller should pause a
        millisecond or two (best: poll for new calls) instead of spinning.
        """
        return self._is_stalled

    def add_request(self, message: GenerateRequest) -> None:
        """Queue a request. A refusal comes as the request's only output, from the next step."""
        try:
            self.scheduler.add_request(self._intake.accept(message))
        except LoraplexError as error:
            self._refusals.append(_refusal(message.request_id, error))

    def abort(self, request_ids: list[str]) -> None:
        """Free blocks and leases now; the last outputs come from the next step. Unknown ids are ignored."""
        self.scheduler.abort_requests(request_ids)

    def handle(self, call: EngineCall) -> None:
        """Take any call that may cross the process boundary. Replies to control calls come from `take_replies`."""
        match call:
            case GenerateRequest():
                self.add_request(call)
            case AbortRequests():
                self.abort(call.request_ids)
            case LoadAdapter():
                self._calls.load(call)
            case UnloadAdapter():
                self._calls.unload(call)
            case PinAdapter():
                self._calls.pin(call)
            case UnpinAdapter():
                self._calls.unpin(call)
            case GetIntegrity():
                self._replies.append(CallReply(call_id=call.call_id, integrity=self.integrity()))
            case _:
                assert_never(call)

    def take_replies(self) -> list[CallReply]:
        """Replies since the last call; each control call is answered once."""
        replies, self._replies = self._replies + self._calls.take_replies(), []
        return replies

    def stats(self) -> EngineStats:
        scheduler, kv_cache, totals = self.scheduler, self.scheduler.kv_cache, self.scheduler.totals
        adapters, runner = self._adapters.stats, self._runner.totals()
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_waiting_for_adapter=scheduler.num_waiting_for_adapter,
            num_blocks=kv_cache.num_blocks,
            num_blocks_used=kv_cache.num_blocks_used,
            num_blocks_cached=kv_cache.num_blocks_cached,
            num_slots=adapters.num_slots,
            num_attention_slots_used=adapters.num_attention_slots_used,
            num_mlp_slots_used=adapters.num_mlp_slots_used,
            total_steps=self._num_steps,
            total_replayed_steps=runner.replayed_steps,
            total_fallbacks=dict(runner.fallbacks),
            total_preemptions=totals.preemptions,
            total_prompt_tokens=totals.prompt_tokens,
            total_cached_tokens=totals.cached_tokens,
            total_output_tokens=totals.output_tokens,
            total_adapter_loads=adapters.total_loads,
            total_adapter_evictions=adapters.total_evictions,
            resident=tuple(ResidentAdapter(**entry._asdict()) for entry in self._adapters.resident()),
        )

    def integrity(self) -> IntegrityReport:
        adapters = self._adapters.stats
        return IntegrityReport(
            num_requests=self.scheduler.num_requests,
            num_blocks_in_use=self.scheduler.kv_cache.num_blocks_used,
            num_leases=adapters.num_leases,
            num_references=adapters.num_references,
            num_pending_loads=adapters.num_pending_loads,
            faults=(*self.scheduler.check_integrity(), *self._adapters.check_integrity()),
        )

    def _execute(self, output: SchedulerOutput) -> RunnerOutput:
        with self._adapters.holding_loads():
            return self._runner.execute(output)

    def _advance_adapters(self) -> None:
        failures = self._adapters.advance()
        self.scheduler.fail_loads(failures)
        self._calls.settle(failures)

    def _take_refusals(self) -> list[RequestOutput]:
        refusals, self._refusals = self._refusals, []
        return refusals


def create_engine_core(
    *, config: EngineConfig, num_blocks: int, limits: ModelLimits, runner: Runner, adapters: AdapterControl
) -> EngineCore:
    """An engine with first come, first served. `num_blocks` and `limits` are what start-up found out."""
    scheduler = create_scheduler(config=config, num_blocks=num_blocks, adapters=adapters)
    return EngineCore(scheduler=scheduler, runner=runner, adapters=adapters, limits=limits)


def _refusal(request_id: str, error: LoraplexError) -> RequestOutput:
    return RequestOutput(
        request_id=request_id,
        finish_reason=FinishReason.ERROR,
        error=ErrorInfo(code=error.code, message=error.message),
    )
