"""Control calls on adapters: load, unload, pin, unpin. Each is answered once, some only steps later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import LoraSelection
from loraplex.adapters.residency import LoadFailure, Residency
from loraplex.engine.core.adapter_control import AdapterControl
from loraplex.engine.errors import NoFreeSlotsError
from loraplex.engine.messages import CallReply, LoadAdapter, PinAdapter, UnloadAdapter, UnpinAdapter
from loraplex.engine.outputs import ErrorInfo

T = TypeVar("T")


class AdapterCalls:
    """Pending loads and unloads.

    A load holds a reference from the call and a lease while it loads, neither afterwards. It takes no slot that a
    request waits for, and gives way to one. An unload is tried before every step until nobody holds the adapter.
    """

    def __init__(self, adapters: AdapterControl, drop_cached: Callable[[str], None]) -> None:
        self._adapters = adapters
        self._drop_cached = drop_cached
        self._queued: list[LoadAdapter] = []
        self._loading: list[LoadAdapter] = []
        self._unloads: list[UnloadAdapter] = []
        self._replies: list[CallReply] = []

    @property
    def has_pending(self) -> bool:
        """Whether steps have to go on for it; replies do not need any."""
        return bool(self._queued or self._loading or self._unloads)

    def load(self, call: LoadAdapter) -> None:
        selection = LoraSelection.single(call.ref)
        try:
            self._adapters.check_fits(selection)
        except LoraplexError as error:
            self._reply(call.call_id, error)
            return
        self._adapters.add_reference(selection)
        self._queued.append(call)

    def unload(self, call: UnloadAdapter) -> None:
        self._unloads.append(call)

    def pin(self, call: PinAdapter) -> None:
        try:
            self._adapters.pin(call.ref)
        except LoraplexError as error:
            self._reply(call.call_id, error)
        else:
            self._reply(call.call_id)

    def unpin(self, call: UnpinAdapter) -> None:
        self._adapters.unpin(call.digest)
        self._reply(call.call_id)

    def settle(self, failures: Sequence[LoadFailure]) -> None:
        """Before a step: answer the loads that have ended and the unloads that nothing holds up any more."""
        errors = {failure.digest: failure.error for failure in failures}
        for call in _drain(self._loading):
            error = errors.get(call.ref.digest)
            if error is None and not self._adapters.is_resident(LoraSelection.single(call.ref)):
                self._loading.append(call)
                continue
            self._adapters.release(LoraSelection.single(call.ref))
            self._end_load(call, error)
        for unload in _drain(self._unloads):
            if self._adapters.unload(unload.digest):
                self._drop_cached(unload.digest)
                self._reply(unload.call_id)
            else:
                self._unloads.append(unload)

    def start_loads(self, *, may_take_slots: bool) -> None:
        """After a step, so that requests had the first choice: begin what has room.

        A load that finds none waits for the other loads called for, and is refused when there are none. Without
        `may_take_slots` all are refused that are not resident.
        """
        if not may_take_slots:
            self._give_way()
        for call in _drain(self._queued):
            selection = LoraSelection.single(call.ref)
            may_acquire = may_take_slots or self._adapters.is_resident(selection)
            residency = self._adapters.acquire(selection) if may_acquire else Residency.NO_ROOM
            if residency is not Residency.NO_ROOM:
                self._loading.append(call)
            elif self._loading and may_take_slots:
                self._queued.append(call)
            else:
                self._end_load(call, self._no_free_slots(call))

    def take_replies(self) -> list[CallReply]:
        return _drain(self._replies)

    def _give_way(self) -> None:
        for call in _drain(self._loading):
            selection = LoraSelection.single(call.ref)
            if self._adapters.is_resident(selection):
                self._loading.append(call)
            else:
                self._adapters.release(selection)
                self._end_load(call, self._no_free_slots(call))

    def _end_load(self, call: LoadAdapter, error: LoraplexError | None) -> None:
        self._adapters.drop_reference(LoraSelection.single(call.ref))
        self._reply(call.call_id, error)

    def _reply(self, call_id: int, error: LoraplexError | None = None) -> None:
        info = None if error is None else ErrorInfo(error.code, error.message)
        self._replies.append(CallReply(call_id=call_id, error=info))

    def _no_free_slots(self, call: LoadAdapter) -> NoFreeSlotsError:
        entries = self._adapters.resident()
        return NoFreeSlotsError(
            f"adapter {call.ref.digest[:12]} needs {call.ref.num_attention_slots} attention and "
            f"{call.ref.num_mlp_slots} MLP slots of the {self._adapters.stats.num_slots} in each space; of the "
            f"{len(entries)} resident adapters {sum(entry.leases > 0 for entry in entries)} are in use and "
            f"{sum(entry.pinned for entry in entries)} pinned, and requests come first: try again later, or unpin one"
        )


def _drain(items: list[T]) -> list[T]:
    drained = items[:]
    items.clear()
    return drained
