"""Which requests hold leases on adapter slots. Only RUNNING and WAITING_FOR_ADAPTER requests do."""

from __future__ import annotations

from collections.abc import Iterator, Set

from loraplex.adapters.residency import AdapterResidency, Residency
from loraplex.engine.request import Request, RequestStatus


class SlotLeases:
    """One lease per request on all slots of its selection; the base needs none and is always resident.

    A holder that waits for its load has no blocks, and gives way to a request ahead of it in the queue.
    """

    def __init__(self, adapters: AdapterResidency) -> None:
        self._adapters = adapters
        self._holders: dict[str, Request] = {}  # in the order of taking

    def take(self, request: Request, *, may_load: bool, ahead: Set[str]) -> Residency:
        """RESIDENT or LOADING with the lease held (also if it was held before), NO_ROOM without.

        With `may_load`, waiting holders that are not `ahead` of the request (ids) give way, the latest first. Without,
        nothing is loaded and nobody's slot is taken.
        """
        is_resident = self._adapters.is_resident(request.selection)
        if request.selection.is_base or self.is_held_by(request):
            return Residency.RESIDENT if is_resident else Residency.LOADING
        if not may_load:
            return self._acquire(request) if is_resident else Residency.NO_ROOM
        residency = self._acquire(request)
        for holder in reversed(self.waiting_holders()):
            if residency is not Residency.NO_ROOM:
                break
            if holder.request_id not in ahead:
                self.give_way(holder)
                residency = self._acquire(request)
        return residency

    def give_back(self, request: Request) -> None:
        """Release the lease, if the request holds one; the weights stay as cache."""
        if self._holders.pop(request.request_id, None) is not None:
            self._adapters.release(request.selection)

    def give_way(self, request: Request) -> None:
        """A waiting request gives up the lease that it may hold, and waits like any other."""
        self.give_back(request)
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING

    def is_held_by(self, request: Request) -> bool:
        return request.request_id in self._holders

    def waiting_holders(self) -> list[Request]:
        """Holders without KV blocks, in the order in which they took their lease."""
        return [r for r in self._holders.values() if r.status is RequestStatus.WAITING_FOR_ADAPTER]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._holders.values())

    def _acquire(self, request: Request) -> Residency:
        residency = self._adapters.acquire(request.selection)
        if residency is not Residency.NO_ROOM:
            self._holders[request.request_id] = request
        return residency
