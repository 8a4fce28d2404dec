"""Joins reader, host cache, slot pool and slot tensors: makes versions resident and keeps them so while used."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import NamedTuple

from loraplex.adapters.errors import AdapterLoadError, NeverFitsError
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.host_loader import AdapterReader, HostLoader
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.adapters.residency import LoadFailure, Residency
from loraplex.adapters.slot_budget import check_pin, check_selection
from loraplex.adapters.slot_loads import SlotLoads
from loraplex.adapters.slot_pool import Admission, SlotPool
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.adapters.turns import PIECE_BYTES, Turns
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot


class ResidentEntry(NamedTuple):
    """One version that holds slots; the fields of `engine.messages.ResidentAdapter`."""

    digest: str
    num_attention_slots: int
    num_mlp_slots: int
    leases: int
    pinned: bool
    is_loading: bool


class AdapterStats(NamedTuple):
    num_slots: int  # in each space
    num_attention_slots_used: int
    num_mlp_slots_used: int
    num_leases: int
    num_references: int
    num_pending_loads: int
    total_loads: int
    total_evictions: int
    host_bytes: int


class AdapterManager:
    """Implements `AdapterResidency`. All methods are for the step thread only, and none blocks.

    `advance` copies into slots at most `max_copy_bytes` (or one rank row, if that is more) at a time, and goes on while
    the loads' share of the last step lasts.
    `host_memory_bytes` bounds the host cache; weights on their way to slots that found no room there come on top.
    """

    def __init__(
        self,
        reader: AdapterReader,
        tensors: SlotTensors,
        *,
        host_memory_bytes: int,
        max_copy_bytes: int = PIECE_BYTES,
        num_loader_threads: int = 2,
    ) -> None:
        self._pool = SlotPool(tensors.num_slots)
        self._host = HostCache(host_memory_bytes)
        self._turns = Turns()
        self._loader = HostLoader(reader, self._turns.piece, num_threads=num_loader_threads)
        self._loads = SlotLoads(tensors, self._host, self._loader, max_copy_bytes=max_copy_bytes)
        self._wanted: dict[str, AdapterRef] = {}  # loads without a lease: control calls and pins
        self._leased: Counter[LoraSelection] = Counter()
        self._leased_slots: dict[bytes, SelectionSlots] = {}  # by the selection's digest; lasts as long as its leases
        self._referenced: Counter[LoraSelection] = Counter()
        self._total_evictions = 0

    def add_reference(self, selection: LoraSelection) -> None:
        self._referenced[selection] += 1
        for ref in selection.refs:
            self._host.add_reference(ref.digest)

    def drop_reference(self, selection: LoraSelection) -> None:
        _subtract(self._referenced, selection)
        for ref in selection.refs:
            self._host.drop_reference(ref.digest)

    def check_fits(self, selection: LoraSelection) -> None:
        """Raise NeverFitsError when the selection needs more slots than the pool has beside the pinned ones."""
        check_selection(selection, self._pool.pinned, num_slots=self._pool.num_slots)

    def acquire(self, selection: LoraSelection) -> Residency:
        """Lease all slots of the selection, or none. Each success wants its own `release`."""
        if selection.is_base:
            return Residency.RESIDENT
        admission = self._pool.admit(selection.refs)
        if admission is None:
            return Residency.NO_ROOM
        self._apply(admission)
        for ref in selection.refs:
            self._pool.lease(ref.digest)
            if self._loads.is_failed(ref.digest):
                self._loads.begin(ref.digest, self._pool.slots(ref.digest))
        self._leased[selection] += 1
        return Residency.RESIDENT if self.is_resident(selection) else Residency.LOADING

    def release(self, selection: LoraSelection) -> None:
        if selection.is_base:
            return
        _subtract(self._leased, selection)
        if selection not in self._leased:
            self._leased_slots.pop(selection.digest, None)
        for ref in selection.refs:
            self._pool.unlease(ref.digest)
            self._free_if_failed(ref.digest)

    def is_resident(self, selection: LoraSelection) -> bool:
        return all(self._loads.is_ready(ref.digest) for ref in selection.refs)

    def slots(self, selection: LoraSelection) -> SelectionSlots:
        """One object for all steps and requests of a leased selection: leased slots stay where they are."""
        slots = self._leased_slots.get(selection.digest)
        if slots is None:
            assert self.is_resident(selection), "slots are published when every part is complete"
            slots = self._collect_slots(selection)
            if selection in self._leased:
                self._leased_slots[selection.digest] = slots
        return slots

    def _collect_slots(self, selection: LoraSelection) -> SelectionSlots:
        held = [(self._pool.slots(part.ref.digest), part.weight) for part in selection.parts]
        return SelectionSlots(
            attention=tuple(WeightedSlot(slot, weight) for slots, weight in held for slot in slots.attention),
            mlp=tuple(WeightedSlot(slot, weight) for slots, weight in held for slot in slots.mlp),
        )

    def prefetch(self, selection: LoraSelection) -> None:
        """Read ahead, for as long as the selection is referenced."""
        for ref in selection.refs:
            self._loads.prefetch(ref.digest)

    def advance(self) -> list[LoadFailure]:
        failures = self._start_wanted() + self._loads.advance(budget_s=self._turns.budget_s)
        for failure in failures:
            self._wanted.pop(failure.digest, None)
            self._free_if_failed(failure.digest)
        return failures

    def holding_loads(self) -> AbstractContextManager[None]:
        """Loader threads rest while the block runs, after they had their share of the time that the last one took."""
        return self._turns.step()

    @property
    def has_pending_loads(self) -> bool:
        return bool(self._wanted) or self._loads.num_pending > 0

    @property
    def is_copying(self) -> bool:
        return self._loads.is_copying

    def load(self, ref: AdapterRef) -> None:
        """Make resident as soon as there is room, without a lasting lease; poll `is_loaded`, watch `advance`.

        Raises:
            NeverFitsError: it needs more slots than are not pinned.
        """
        self.check_fits(LoraSelection.single(ref))
        self._wanted[ref.digest] = ref

    def is_loaded(self, digest: str) -> bool:
        return self._loads.is_ready(digest)

    def unload(self, digest: str) -> bool:
        """Forget slots and host copy, also of a load under way; False (and nothing changed) while it is in use.

        A pin on the version stays, and keeps its share of the slots, until `unpin`.
        """
        if self._pool.leases(digest) or self._host.references(digest):
            return False
        self._wanted.pop(digest, None)
        self._loads.forget(digest)
        if digest in self._pool:
            self._pool.free(digest)
        self._loads.forget_host_copy(digest)
        return True

    def pin(self, ref: AdapterRef) -> None:
        """Load, and never a victim from now on.

        Raises:
            NeverFitsError: a space would have no unpinned slot left, or an accepted request would no longer fit.
        """
        if not self._pool.is_pinned(ref.digest):
            check_pin(ref, self._pool.pinned, self._referenced, num_slots=self._pool.num_slots)
            self._pool.pin(ref)
        self._wanted[ref.digest] = ref

    def unpin(self, digest: str) -> None:
        self._pool.unpin(digest)

    def resident(self) -> tuple[ResidentEntry, ...]:
        return tuple(
            ResidentEntry(
                digest=ref.digest,
                num_attention_slots=ref.num_attention_slots,
                num_mlp_slots=ref.num_mlp_slots,
                leases=self._pool.leases(ref.digest),
                pinned=self._pool.is_pinned(ref.digest),
                is_loading=not self._loads.is_ready(ref.digest),
            )
            for ref in self._pool
            if not self._loads.is_failed(ref.digest)
        )

    @property
    def stats(self) -> AdapterStats:
        return AdapterStats(
            num_slots=self._pool.num_slots,
            num_attention_slots_used=self._pool.num_attention_slots_used,
            num_mlp_slots_used=self._pool.num_mlp_slots_used,
            num_leases=self.num_leases,
            num_references=self.num_references,
            num_pending_loads=self._loads.num_pending,
            total_loads=self._loads.total_loads,
            total_evictions=self._total_evictions,
            host_bytes=self._host.num_bytes,
        )

    @property
    def num_leases(self) -> int:
        return self._pool.num_leases

    @property
    def num_references(self) -> int:
        return self._host.num_references

    def check_integrity(self) -> list[str]:
        """Faults of pool, cache and states; empty when all is well."""
        holders = {ref.digest for ref in self._pool}
        faults = self._pool.check_integrity() + self._host.check_integrity() + self._loads.check_integrity(holders)
        leases, references = _count_parts(self._leased), _count_parts(self._referenced)
        for digest in sorted(holders | leases.keys()):
            if self._pool.leases(digest) != leases[digest]:
                faults.append(f"{digest} has {self._pool.leases(digest)} leases, requests hold {leases[digest]}")
        if self._host.num_references != references.total():
            faults.append(f"{self._host.num_references} references, requests hold {references.total()}")
        return faults

    def close(self) -> None:
        """Stop the loader threads; reads under way end by themselves."""
        self._loader.close()

    def _apply(self, admission: Admission) -> None:
        for digest in admission.evicted:
            self._loads.forget(digest)
            self._total_evictions += 1
        for digest in admission.admitted:
            self._loads.begin(digest, self._pool.slots(digest))

    def _free_if_failed(self, digest: str) -> None:
        if self._loads.is_failed(digest) and not self._pool.leases(digest):
            self._loads.forget(digest)
            self._pool.free(digest)

    def _start_wanted(self) -> list[LoadFailure]:
        """Give slots to loads without a lease. They evict no load under way, or two could chase each other for ever."""
        failures = []
        for digest, ref in list(self._wanted.items()):
            if self._loads.is_ready(digest):
                del self._wanted[digest]
            elif digest not in self._pool:
                admission = self._pool.admit([ref], spared=self._loads.under_way)
                if admission is not None:
                    self._apply(admission)
                elif (error := self._never_fits(ref)) is not None:
                    failures.append(LoadFailure(digest, error))
        return failures

    def _never_fits(self, ref: AdapterRef) -> AdapterLoadError | None:
        """Pins that came after the call may have taken the room."""
        try:
            self.check_fits(LoraSelection.single(ref))
        except NeverFitsError as error:
            return AdapterLoadError(error.message)
        return None


def _subtract(counter: Counter[LoraSelection], selection: LoraSelection) -> None:
    assert counter[selection] > 0, "given back more often than taken"
    counter[selection] -= 1
    if not counter[selection]:
        del counter[selection]


def _count_parts(selections: Counter[LoraSelection]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for selection, num in selections.items():
        for ref in selection.refs:
            counts[ref.digest] += num
    return counts
