"""The batch of one step while it is being put together."""

from __future__ import annotations

from loraplex.adapters.residency import AdapterResidency
from loraplex.engine.request import Request
from loraplex.engine.scheduler_output import ScheduledRequest


class StepPlan:
    """Counts what is left of `max_num_batched_tokens`."""

    def __init__(self, max_num_batched_tokens: int, adapters: AdapterResidency) -> None:
        self.num_tokens_left = max_num_batched_tokens
        self._adapters = adapters
        self._entries: list[ScheduledRequest] = []

    def add(self, request: Request) -> None:
        """As many of the request's tokens as the step still holds."""
        num_tokens = min(request.num_tokens_to_compute, self.num_tokens_left)
        assert num_tokens > 0
        self.num_tokens_left -= num_tokens
        slots = None if request.selection.is_base else self._adapters.slots(request.selection)
        self._entries.append(ScheduledRequest(request=request, num_tokens=num_tokens, slots=slots))

    def entries(self) -> tuple[ScheduledRequest, ...]:
        """One-token entries first, as attention wants its decodes; otherwise in the order of scheduling."""
        return tuple(sorted(self._entries, key=lambda entry: entry.num_tokens > 1))
