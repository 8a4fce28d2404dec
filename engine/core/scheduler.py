"""Gives tokens, KV blocks and adapter slots to requests; the only writer of Request state.

There is no prefill phase and no decode phase: a request has tokens whose KV does not exist yet, and a step computes
some of them. Requests that lack one token (decodes) go first, then the others in the order of their admission, then
new admissions, while seats (`max_num_seqs`) and tokens (`max_num_batched_tokens`) last.

                                     lease granted, loading
       add_request ---> WAITING ------------------------------> WAITING_FOR_ADAPTER
                          ^  |                                       |       |
    no blocks, gives way  |  | lease, blocks          resident, blocks       | no blocks, gives way
                          |  v                                       v       v
                          |  RUNNING <-------------------------------+    WAITING / PREEMPTED
                          |   |   ^
             no block left|   |   | lease, blocks
                          |   v   |
                          | PREEMPTED         every state ---> one FINISHED_*, said in exactly one output

Nobody holds and waits: only RUNNING requests hold blocks, and they wait for nothing but blocks. When a RUNNING
request needs one, victims are those admitted after it; if there are none, it preempts itself. So the earliest
admitted always finishes. A WAITING request preempts nobody. Slots are never wanted by a RUNNING request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from loraplex.adapters.errors import InvalidRequestError, LoraplexError
from loraplex.adapters.residency import AdapterResidency, LoadFailure
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.admission import Admission
from loraplex.engine.core.admission_policy import AdmissionPolicy, FirstComeFirstServed
from loraplex.engine.core.kv_cache_manager import KVCacheManager
from loraplex.engine.core.prefix_followers import PrefixFollowers
from loraplex.engine.core.prompt_logprobs import PromptLogprobs
from loraplex.engine.core.scheduler_integrity import check_leases, check_places
from loraplex.engine.core.slot_leases import SlotLeases
from loraplex.engine.core.step_plan import StepPlan
from loraplex.engine.core.stop_rule import status_after_token
from loraplex.engine.errors import ContextLengthError, NonFiniteLogitsError
from loraplex.engine.outputs import ErrorInfo, RequestOutput
from loraplex.engine.request import Request, RequestStatus
from loraplex.engine.scheduler_output import RequestResult, RunnerOutput, ScheduledRequest, SchedulerOutput

MAX_PREFETCHED = 4  # from the front of the queue


@dataclass(slots=True)
class Totals:
    """Running totals since the start."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Scheduler:
    """Between steps: `add_request`, `abort_requests`, `fail_loads`. Each step: `schedule`, then `update`."""

    def __init__(
        self,
        *,
        kv_cache: KVCacheManager,
        adapters: AdapterResidency,
        policy: AdmissionPolicy,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        assert max_num_batched_tokens >= max_num_seqs, "every running request must be able to decode in one step"
        self.kv_cache = kv_cache
        self.totals = Totals()
        self._adapters = adapters
        self._policy = policy
        self._leases = SlotLeases(adapters)
        self._admission = Admission(
            policy=policy, kv_cache=kv_cache, adapters=adapters, leases=self._leases, on_never_fits=self._fail
        )
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._requests: dict[str, Request] = {}  # all accepted, unfinished ones
        self._running: dict[str, Request] = {}  # in the order of admission
        self._followers = PrefixFollowers()
        self._prompt_logprobs = PromptLogprobs()
        self._outputs: list[RequestOutput] = []
        self._prefetched: set[str] = set()
        self._num_accepted = 0

    def add_request(self, request: Request) -> None:
        """Accept a request, or raise InvalidRequestError, ContextLengthError or NeverFitsError if it can never run."""
        self._check_can_run(request)
        leader = self._requests.get(request.prefix_leader_id or "")
        request.arrival_index = self._num_accepted
        self._num_accepted += 1
        self._requests[request.request_id] = request
        self._adapters.add_reference(request.selection)
        if leader is None:
            request.prefix_leader_id = None
        elif self._has_cached_prompt(leader):
            request.num_cached_tokens = leader.num_cached_tokens
        else:
            self._followers.hold(request, leader)
            return
        self._policy.add(request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests in whatever state; unknown ids are ignored (they may have just finished)."""
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._say(request, RequestStatus.FINISHED_ABORTED)

    def fail_loads(self, failures: list[LoadFailure]) -> None:
        """End exactly the requests that wait for an adapter which could not be loaded."""
        for failure in failures:
            for request in self._leases.waiting_holders():
                if any(ref.digest == failure.digest for ref in request.selection.refs):
                    self._fail(request, failure.error)

    def drop_cached(self, adapter_digest: str) -> None:
        """Forget cached prefixes that were computed under the adapter."""
        self.kv_cache.drop_cached(adapter_digest)

    def schedule(self) -> SchedulerOutput:
        """What to compute next; empty when nobody can go on."""
        self._policy.begin_step()
        step = StepPlan(self._max_num_batched_tokens, self._adapters)
        self._schedule_running(step)
        self._admit_waiting(step)
        self._prefetch_next()
        entries = step.entries()
        for entry in entries:
            self._policy.charge(entry.request, entry.num_tokens)
        # An empty step is not executed: what has to be zeroed waits for one that is.
        blocks_to_zero = self.kv_cache.take_blocks_to_zero() if entries else ()
        return SchedulerOutput(scheduled=entries, blocks_to_zero=blocks_to_zero)

    def update(self, output: SchedulerOutput, results: RunnerOutput) -> list[RequestOutput]:
        """Take in what the runner computed; all outputs since the last update."""
        for entry, result in zip(output.scheduled, results.results, strict=True):
            self._take_result(entry, result)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _schedule_running(self, step: StepPlan) -> None:
        running = tuple(self._running.values())
        for request in running:
            # A victim was admitted later than whoever needs its blocks, so it is not in the step yet.
            is_decode = request.status is RequestStatus.RUNNING and request.num_tokens_to_compute == 1
            if is_decode and self._make_room(request):
                step.add(request)
        for request in running:
            if request.status is RequestStatus.RUNNING and request.num_tokens_to_compute > 1 and step.num_tokens_left:
                step.add(request)

    def _make_room(self, request: Request) -> bool:
        """Get the block for the request's next token, if need be by preemption. False: it was itself preempted."""
        while not self.kv_cache.grow(request):
            running = list(self._running.values())
            younger = running[running.index(request) + 1 :]
            victim = self._policy.choose_victim(younger) if younger else request
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        del self._running[request.request_id]
        self.kv_cache.free(request)
        self._leases.give_back(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.totals.preemptions += 1
        self._policy.add(request)

    def _admit_waiting(self, step: StepPlan) -> None:
        admitted = self._admission.admitted()
        while step.num_tokens_left and len(self._running) < self._max_num_seqs:
            request = next(admitted, None)
            if request is None:
                return
            request.status = RequestStatus.RUNNING
            self._running[request.request_id] = request
            if request.num_preemptions == 0:
                self._count_prompt(request)
            step.add(request)

    def _prefetch_next(self) -> None:
        """The files of those who are next are read while they wait, once for each request."""
        for request in islice(self._policy, MAX_PREFETCHED):
            if request.request_id not in self._prefetched:
                self._prefetched.add(request.request_id)
                self._adapters.prefetch(request.selection)

    def _count_prompt(self, request: Request) -> None:
        if request.prefix_leader_id is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.totals.prompt_tokens += request.num_prompt_tokens
            self.totals.cached_tokens += request.num_cached_tokens

    def _take_result(self, entry: ScheduledRequest, result: RequestResult) -> None:
        request = entry.request
        assert result.request_id == request.request_id, "nobody gets another's token"
        if not result.is_finite:
            self._fail_non_finite(request)
            return
        num_tokens_before = request.num_computed_tokens
        request.num_computed_tokens += entry.num_tokens
        self.kv_cache.publish(request, num_tokens_before)
        if self._followers.has_any(request) and self._has_cached_prompt(request):
            self._release_followers(request)
        self._prompt_logprobs.collect(request, num_tokens_before, result.prompt_logprobs)
        if result.token_id is not None:
            request.token_ids.append(result.token_id)
            self.totals.output_tokens += 1
            self._say(request, status_after_token(request), result=result)
        elif request.num_tokens_to_compute == 0:  # max_tokens is 0: only the prompt was wanted
            self._say(request, RequestStatus.FINISHED_LENGTH, result=result)

    def _say(
        self,
        request: Request,
        status: RequestStatus,
        *,
        result: RequestResult | None = None,
        error: LoraplexError | None = None,
    ) -> None:
        """Tell the client what is new, and end the request if `status` is a finished one."""
        token_id = result.token_id if result else None
        self._outputs.append(
            RequestOutput(
                request_id=request.request_id,
                new_token_ids=() if token_id is None else (token_id,),
                new_logprobs=(result.logprobs,) if result and result.logprobs else (),
                prompt_logprobs=self._prompt_logprobs.take(request) if result else None,
                num_cached_tokens=request.num_cached_tokens,
                finish_reason=status.finish_reason,
                stop_token_id=token_id if status is RequestStatus.FINISHED_STOPPED else None,
                error=ErrorInfo(error.code, error.message) if error else None,
            )
        )
        if status.is_finished:
            self._retire(request, status)

    def _fail(self, request: Request, error: LoraplexError) -> None:
        self._say(request, RequestStatus.FINISHED_FAILED, error=error)

    def _fail_non_finite(self, request: Request) -> None:
        self.kv_cache.discard(request)
        place = f"output token {request.num_output_tokens + 1}" if request.num_output_tokens else "the prompt"
        self._fail(request, NonFiniteLogitsError(f"the model produced NaN or Inf at {place}"))

    def _retire(self, request: Request, status: RequestStatus) -> None:
        """Take an ended request out of every table."""
        if self._running.pop(request.request_id, None) is None:
            if self._followers.is_held(request):
                self._followers.remove(request)
            else:
                self._policy.remove(request)
        self.kv_cache.free(request)
        self._leases.give_back(request)
        self._adapters.drop_reference(request.selection)
        self._prompt_logprobs.drop(request)
        self._prefetched.discard(request.request_id)
        self._release_followers(request)
        del self._requests[request.request_id]
        request.status = status

    def _has_cached_prompt(self, request: Request) -> bool:
        """Whether all full blocks of its prompt can be found, or never will be because it does not use the cache."""
        num_cacheable = request.num_prompt_tokens // self.kv_cache.block_size * self.kv_cache.block_size
        never = not self.kv_cache.is_caching or request.wants_prompt_logprobs
        return never or request.num_computed_tokens >= num_cacheable

    def _release_followers(self, leader: Request) -> None:
        has_cached_prompt = self._has_cached_prompt(leader)
        for follower in self._followers.release(leader):
            if has_cached_prompt:
                follower.num_cached_tokens = leader.num_cached_tokens
            else:  # the leader ended first
                follower.prefix_leader_id = None
            self._policy.add(follower)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._outputs)

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def running_request_ids(self) -> list[str]:
        """Of the requests that a step may compute, in the order of admission."""
        return list(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_for_adapter(self) -> int:
        return len(self._leases.waiting_holders())

    @property
    def num_waiting(self) -> int:
        return len(self._policy) + len(self._followers) - self.num_waiting_for_adapter

    @property
    def reserves_slots(self) -> bool:
        """True while a request waits for slots; control calls then start no loads."""
        return self._policy.reserves_slots

    def check_integrity(self) -> list[str]:
        """Faults in the tables; empty when all is well."""
        requests = self._requests.values()
        return [
            *self.kv_cache.check_integrity(requests),
            *check_places(requests, running=self._running.values(), waiting=self._policy, held=self._followers),
            *check_leases(requests, self._leases),
        ]

    def _check_can_run(self, request: Request) -> None:
        if request.request_id in self._requests:
            raise InvalidRequestError(f"request id {request.request_id} is in use", param="request_id")
        self._adapters.check_fits(request.selection)
        num_tokens = request.num_prompt_tokens + max(0, request.max_tokens - 1)  # the last one needs no KV
        num_blocks = self.kv_cache.num_blocks_for(num_tokens)
        if num_blocks > self.kv_cache.num_blocks:
            raise ContextLengthError(
                f"{request.num_prompt_tokens} prompt and up to {request.max_tokens} output tokens need {num_blocks} KV "
                f"cache blocks; this server has {self.kv_cache.num_blocks}: shorten the prompt or lower max_tokens",
                param="prompt",
            )


def create_scheduler(*, config: EngineConfig, num_blocks: int, adapters: AdapterResidency) -> Scheduler:
    """First come, first served, with the configured budgets."""
    kv_cache = KVCacheManager(
        num_blocks=num_blocks, block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
    )
    return Scheduler(
        kv_cache=kv_cache,
        adapters=adapters,
        policy=FirstComeFirstServed(),
        max_num_seqs=config.num_seats,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
