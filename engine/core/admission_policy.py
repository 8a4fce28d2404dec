"""Who is admitted next: the order of the queue, who may overtake whom, and who gives way to a running request.

The scheduler asks for candidates one after the other and reports what a candidate lacked; it knows no order itself.

Only the head of the order may start a load: for slots that is the first candidate without a lease, all ahead of it
having theirs (or lacking blocks, so that slots are of no use to them now).

Reserve and drain (first come, first served). The first candidate that lacks something is *blocked*. What it lacks
is reserved for it in two stages:

1. For `MAX_OVERTAKEN_STEPS` steps others may pass it, which keeps the device busy. If it lacks slots, those behind it
   may only use what is resident already, and nobody loads; if it lacks KV blocks, they may load.
2. After that the engine drains. If it lacks slots, nobody behind it takes or renews a lease, and only the base goes
   on; if it lacks blocks, nobody behind it is admitted, and it keeps the lease that it may hold.

A running request never waits for slots and ends within its `max_tokens`, so each drain ends after at most R steps, the
longest run of a request. The blocked one may have to drain slots, then blocks, then (others went on while its adapter
was loading) blocks again: it is admitted at most `MAX_OVERTAKEN_STEPS` + 3 R + its own load steps after it came to
the front, whoever else arrives. A preempted request that comes back ahead of it has its own such wait first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple, Protocol

from loraplex.engine.request import Request, RequestStatus

MAX_OVERTAKEN_STEPS = 16
MAX_LOOKAHEAD = 128  # candidates looked at in one step, so that a long queue does not cost a step more


class Lack(Enum):
    SLOTS = auto()  # every slot it needs is leased or pinned
    BLOCKS = auto()  # its tokens need more KV blocks than are free


class Candidate(NamedTuple):
    request: Request
    may_load: bool  # False: admit it only if its adapters are resident


class AdmissionPolicy(Protocol):
    """Owns the requests that wait: WAITING, WAITING_FOR_ADAPTER and PREEMPTED."""

    def add(self, request: Request) -> None:
        """A new request, or one that was preempted."""
        ...

    def remove(self, request: Request) -> None:
        """It was admitted, or it ended while it waited."""
        ...

    def begin_step(self) -> None: ...

    def candidates(self) -> Iterator[Candidate]:
        """Who may be admitted in this step, in order.

        While it runs, others may be added, and only the one just given may be removed.
        """
        ...

    def report_lack(self, request: Request, lack: Lack) -> bool:
        """The candidate just given cannot be admitted in this step.

        True when nobody passes it until it is: it may keep the lease that it holds.
        """
        ...

    @property
    def reserves_slots(self) -> bool:
        """True while a request waits for slots, so that nothing else should start to load."""
        ...

    def charge(self, request: Request, num_tokens: int) -> None:
        """The request computes so many tokens in this step."""
        ...

    def choose_victim(self, running: Sequence[Request]) -> Request:
        """Whom to preempt, of running requests in the order of their admission."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """All who wait, in order."""
        ...


class FirstComeFirstServed:
    """Order of arrival, also for those who were preempted; reserve and drain for what the first one lacks."""

    def __init__(self) -> None:
        self._queue: list[Request] = []  # by arrival_index
        self._step = 0
        self._blocked_since: dict[str, int] = {}  # step in which a waiting request was first blocked
        self._blocked: Request | None = None  # the first of this step's candidates that lacked something
        self._lacks: set[Lack] = set()  # of all of this step's candidates
        self._drained: Lack | None = None

    def add(self, request: Request) -> None:
        insort(self._queue, request, key=_arrival)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._queue, request.arrival_index, key=_arrival)
        assert self._queue[index] is request
        del self._queue[index]
        self._blocked_since.pop(request.request_id, None)
        if self._blocked is request:
            self._blocked = None
            self._lacks.clear()

    def begin_step(self) -> None:
        self._step += 1

    def candidates(self) -> Iterator[Candidate]:
        self._blocked = self._drained = None
        self._lacks.clear()
        for request in self._queue[:MAX_LOOKAHEAD]:
            if self._drained is Lack.BLOCKS:
                return
            if self._drained is Lack.SLOTS and not request.selection.is_base:
                continue
            yield Candidate(request, may_load=Lack.SLOTS not in self._lacks)

    def report_lack(self, request: Request, lack: Lack) -> bool:
        if self._blocked is None:
            self._blocked = request
            self._blocked_since.setdefault(request.request_id, self._step)
        self._lacks.add(lack)
        must_drain = self._must_drain(request, lack)
        if must_drain:
            self._drained = lack
        return must_drain

    @property
    def reserves_slots(self) -> bool:
        return Lack.SLOTS in self._lacks

    def charge(self, request: Request, num_tokens: int) -> None:
        """First come, first served keeps no accounts."""

    def choose_victim(self, running: Sequence[Request]) -> Request:
        return running[-1]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def _must_drain(self, request: Request, lack: Lack) -> bool:
        if lack is Lack.BLOCKS and request.status is RequestStatus.PREEMPTED:
            return True  # whoever passed it would be the next victim of the same shortage
        is_first = request is self._blocked
        return is_first and self._step - self._blocked_since[request.request_id] >= MAX_OVERTAKEN_STEPS


_arrival = attrgetter("arrival_index")
