"""What one step computes, and what came of it: the two values between scheduler and runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.kernels.lora.metadata import SelectionSlots


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """`num_tokens` tokens of `request`, from position `request.num_computed_tokens` on.

    Its `block_ids` already cover them. It is sampled when the tokens reach the end of `request.token_ids`.
    """

    request: Request
    num_tokens: int
    slots: SelectionSlots | None  # None = the base

    @property
    def is_sampled(self) -> bool:
        request = self.request
        num_known = len(request.token_ids)
        reaches_end = request.num_computed_tokens + self.num_tokens == num_known
        return reaches_end and num_known - len(request.prompt_token_ids) < request.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """The batch of one step, decodes first, then chunks of prefills."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    blocks_to_zero: tuple[int, ...] = ()  # held non-finite values; zeroed before anything reads or writes them

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """What the step made of one scheduled request."""

    request_id: str
    token_id: int | None = None  # None: not sampled in this step
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # predictions of the prompt tokens after the computed ones
    is_finite: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTotals:
    """Which ways the runner's steps took since it started."""

    replayed_steps: int = 0  # from a recorded graph, of all steps
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # calls that took the reference's way, by function


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOutput:
    """Results in the order of `SchedulerOutput.scheduled`."""

    results: tuple[RequestResult, ...] = ()
