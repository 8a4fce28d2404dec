"""Takes requests out of the queue when blocks and slots for them are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from loraplex.adapters.errors import NeverFitsError
from loraplex.adapters.residency import AdapterResidency, Residency
from loraplex.engine.core.admission_policy import AdmissionPolicy, Candidate, Lack
from loraplex.engine.core.kv_cache_manager import KVCacheManager
from loraplex.engine.core.slot_leases import SlotLeases
from loraplex.engine.request import Request, RequestStatus


class Admission:
    """One attempt for each candidate of a step: all it needs, or nothing.

    Blocks are looked for before slots, so that a request without blocks takes no adapter's place.
    """

    def __init__(
        self,
        *,
        policy: AdmissionPolicy,
        kv_cache: KVCacheManager,
        adapters: AdapterResidency,
        leases: SlotLeases,
        on_never_fits: Callable[[Request, NeverFitsError], None],
    ) -> None:
        self._policy = policy
        self._kv_cache = kv_cache
        self._adapters = adapters
        self._leases = leases
        self._on_never_fits = on_never_fits

    def admitted(self) -> Iterator[Request]:
        """Requests that have their blocks and leases now and left the queue; the caller stops when a step is full."""
        given: set[str] = set()
        for candidate in self._policy.candidates():
            given.add(candidate.request.request_id)
            if self._try_admit(candidate, given):
                yield candidate.request

    def _try_admit(self, candidate: Candidate, given: set[str]) -> bool:
        request = candidate.request
        if not self._may_go_on(candidate):
            return False
        prefix = self._kv_cache.find_room(request)
        if prefix is None:
            if not self._policy.report_lack(request, Lack.BLOCKS):
                self._leases.give_way(request)
            return False
        match self._leases.take(request, may_load=candidate.may_load, ahead=given):
            case Residency.RESIDENT:
                self._policy.remove(request)
                self._kv_cache.admit(request, prefix)
                return True
            case Residency.LOADING:
                request.status = RequestStatus.WAITING_FOR_ADAPTER
            case Residency.NO_ROOM:
                self._report_no_room(request)
        return False

    def _may_go_on(self, candidate: Candidate) -> bool:
        """Whether its adapters are there, or it may load them now."""
        request = candidate.request
        may_load = candidate.may_load and not self._leases.is_held_by(request)
        return may_load or self._adapters.is_resident(request.selection)

    def _report_no_room(self, request: Request) -> None:
        try:
            self._adapters.check_fits(request.selection)  # pins may have come since it was accepted
        except NeverFitsError as error:
            self._on_never_fits(request, error)
        else:
            self._policy.report_lack(request, Lack.SLOTS)
