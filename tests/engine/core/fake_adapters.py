"""Adapter memory without weights: real slots, leases, pins and victims; loads last as many steps as a test says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from loraplex.adapters.errors import AdapterLoadError, NeverFitsError
from loraplex.adapters.manager import AdapterStats, ResidentEntry
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.adapters.residency import LoadFailure, Residency
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot


@dataclass(eq=False)
class Resident:
    ref: AdapterRef
    attention: list[int]
    mlp: list[int]
    steps_left: int
    last_use: int
    leases: int = 0
    has_failed: bool = False

    @property
    def is_loaded(self) -> bool:
        return self.steps_left == 0 and not self.has_failed


@dataclass
class FakeAdapters:
    """An `AdapterControl`. Digests in `stuck` load for ever, those in `broken` fail."""

    num_slots: int = 4
    load_steps: int = 1
    stuck: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.residents: dict[str, Resident] = {}
        self.references: Counter[str] = Counter()
        self.pins: dict[str, AdapterRef] = {}
        self.prefetched: list[str] = []
        self.loads: list[str] = []
        self.num_evictions = 0
        self._clock = 0
        self._free_attention = set(range(self.num_slots))
        self._free_mlp = set(range(self.num_slots))

    def holding_loads(self) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def is_copying(self) -> bool:
        return False

    def add_reference(self, selection: LoraSelection) -> None:
        self.references.update(ref.digest for ref in selection.refs)

    def drop_reference(self, selection: LoraSelection) -> None:
        for ref in selection.refs:
            assert self.references[ref.digest] > 0, "a reference was dropped twice"
            self.references[ref.digest] -= 1
        self.references = +self.references

    def check_fits(self, selection: LoraSelection) -> None:
        own = {ref.digest for ref in selection.refs}
        pinned = [ref for digest, ref in self.pins.items() if digest not in own]
        room = self.num_slots - max(_needs(pinned))
        if max(_needs(selection.refs)) > room:
            raise NeverFitsError(f"the selection needs {max(_needs(selection.refs))} slots; {room} can be free")

    def acquire(self, selection: LoraSelection) -> Residency:
        self._clock += 1
        missing = [ref for ref in selection.refs if not self._is_usable(ref)]
        if not self._make_room(missing, keep={ref.digest for ref in selection.refs}):
            return Residency.NO_ROOM
        for ref in missing:
            self._start_load(ref)
        for ref in selection.refs:
            self.residents[ref.digest].leases += 1
            self.residents[ref.digest].last_use = self._clock
        return Residency.RESIDENT if self.is_resident(selection) else Residency.LOADING

    def release(self, selection: LoraSelection) -> None:
        for ref in selection.refs:
            resident = self.residents[ref.digest]
            assert resident.leases > 0, "a lease was given back twice"
            resident.leases -= 1
            if resident.has_failed and not resident.leases:
                self._evict(resident)

    def is_resident(self, selection: LoraSelection) -> bool:
        return all(r.digest in self.residents and self.residents[r.digest].is_loaded for r in selection.refs)

    def slots(self, selection: LoraSelection) -> SelectionSlots:
        assert self.is_resident(selection)
        parts = [(self.residents[part.ref.digest], part.weight) for part in selection.parts]
        assert all(resident.leases for resident, _ in parts), "slots are only for those who hold a lease"
        return SelectionSlots(
            attention=tuple(WeightedSlot(slot, weight) for resident, weight in parts for slot in resident.attention),
            mlp=tuple(WeightedSlot(slot, weight) for resident, weight in parts for slot in resident.mlp),
        )

    def prefetch(self, selection: LoraSelection) -> None:
        self.prefetched += [ref.digest for ref in selection.refs]

    def advance(self) -> list[LoadFailure]:
        failures = []
        for digest, resident in list(self.residents.items()):
            if resident.is_loaded or resident.has_failed or digest in self.stuck:
                continue
            resident.steps_left -= 1
            if resident.steps_left == 0 and digest in self.broken:
                resident.has_failed = True
                failures.append(LoadFailure(digest, AdapterLoadError(f"adapter {digest[:8]} cannot be read")))
                if not resident.leases:
                    self._evict(resident)
        return failures

    @property
    def has_pending_loads(self) -> bool:
        return any(not (resident.is_loaded or resident.has_failed) for resident in self.residents.values())

    def pin(self, ref: AdapterRef) -> None:
        pins = self.pins | {ref.digest: ref}
        if max(_needs(pins.values())) >= self.num_slots or not self._make_room([ref], keep={ref.digest}):
            raise NeverFitsError("the pins would leave no free slot")
        if ref.digest not in self.residents:
            self._start_load(ref)
        self.pins = pins

    def unpin(self, digest: str) -> None:
        self.pins.pop(digest, None)

    def unload(self, digest: str) -> bool:
        resident = self.residents.get(digest)
        if self.references[digest] or (resident is not None and resident.leases):
            return False
        if resident is not None:
            self._evict(resident)
        return True

    def resident(self) -> tuple[ResidentEntry, ...]:
        return tuple(
            ResidentEntry(
                digest, len(r.attention), len(r.mlp), r.leases, digest in self.pins, not (r.is_loaded or r.has_failed)
            )
            for digest, r in self.residents.items()
        )

    @property
    def stats(self) -> AdapterStats:
        return AdapterStats(
            num_slots=self.num_slots,
            num_attention_slots_used=self.num_slots - len(self._free_attention),
            num_mlp_slots_used=self.num_slots - len(self._free_mlp),
            num_leases=sum(resident.leases for resident in self.residents.values()),
            num_references=self.references.total(),
            num_pending_loads=sum(not (r.is_loaded or r.has_failed) for r in self.residents.values()),
            total_loads=len(self.loads),
            total_evictions=self.num_evictions,
            host_bytes=0,
        )

    def check_integrity(self) -> list[str]:
        attention = sorted([*self._free_attention, *(s for r in self.residents.values() for s in r.attention)])
        mlp = sorted([*self._free_mlp, *(s for r in self.residents.values() for s in r.mlp)])
        return [] if attention == mlp == list(range(self.num_slots)) else ["slots are lost or held twice"]

    def digest_in(self, slot: int, *, is_attention: bool) -> str | None:
        """Whose rows a slot holds."""
        for digest, resident in self.residents.items():
            if slot in (resident.attention if is_attention else resident.mlp):
                return digest
        return None

    def _is_usable(self, ref: AdapterRef) -> bool:
        return ref.digest in self.residents and not self.residents[ref.digest].has_failed

    def _make_room(self, missing: list[AdapterRef], *, keep: set[str]) -> bool:
        victims = sorted(
            (r for d, r in self.residents.items() if not r.leases and d not in self.pins.keys() | keep),
            key=lambda resident: resident.last_use,
        )
        attention, mlp = _needs(ref for ref in missing if ref.digest not in self.residents)
        if any(ref.digest in self.residents for ref in missing):  # failed, and still leased by others
            return False
        if attention > len(self._free_attention) + sum(len(r.attention) for r in victims):
            return False
        if mlp > len(self._free_mlp) + sum(len(r.mlp) for r in victims):
            return False
        while attention > len(self._free_attention) or mlp > len(self._free_mlp):
            self._evict(victims.pop(0))
            self.num_evictions += 1
        return True

    def _start_load(self, ref: AdapterRef) -> None:
        self.loads.append(ref.digest)
        self.residents[ref.digest] = Resident(
            ref=ref,
            attention=[self._free_attention.pop() for _ in range(ref.num_attention_slots)],
            mlp=[self._free_mlp.pop() for _ in range(ref.num_mlp_slots)],
            steps_left=self.load_steps,
            last_use=self._clock,
        )

    def _evict(self, resident: Resident) -> None:
        del self.residents[resident.ref.digest]
        self._free_attention.update(resident.attention)
        self._free_mlp.update(resident.mlp)


def _needs(refs: Iterable[AdapterRef]) -> tuple[int, int]:
    refs = list(refs)
    return sum(ref.num_attention_slots for ref in refs), sum(ref.num_mlp_slots for ref in refs)
