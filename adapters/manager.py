"""Joins source, host cache, slot pool and slot tensors: makes versions resident and keeps them so while used."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.adapters.residency import LoadFailure, Residency
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.adapters.source import AdapterSource
from loraplex.kernels.lora.metadata import SelectionSlots


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
    """Implements `AdapterResidency`; all methods are for the step thread only, and none blocks."""

    def __init__(
        self,
        base: BaseSpec,
        source: AdapterSource,
        tensors: SlotTensors,
        *,
        host_memory_bytes: int,
        max_copy_bytes: int = 8 << 20,
        num_loader_threads: int = 2,
    ) -> None: ...

    # AdapterResidency
    def add_reference(self, selection: LoraSelection) -> None: ...
    def drop_reference(self, selection: LoraSelection) -> None: ...
    def check_fits(self, selection: LoraSelection) -> None: ...
    def acquire(self, selection: LoraSelection) -> Residency:
        raise NotImplementedError

    def release(self, selection: LoraSelection) -> None: ...
    def is_resident(self, selection: LoraSelection) -> bool:
        raise NotImplementedError

    def slots(self, selection: LoraSelection) -> SelectionSlots:
        raise NotImplementedError

    def prefetch(self, selection: LoraSelection) -> None: ...
    def advance(self) -> list[LoadFailure]:
        raise NotImplementedError

    @property
    def has_pending_loads(self) -> bool:
        raise NotImplementedError

    # control calls
    def load(self, ref: AdapterRef) -> None:
        """Make resident as soon as there is room, without a lasting lease; poll `is_loaded`, watch `advance`.

        Raises NeverFitsError.
        """

    def is_loaded(self, digest: str) -> bool:
        raise NotImplementedError

    def unload(self, digest: str) -> bool:
        """Forget slots and host copy; False (and nothing changed) while a lease or reference is held."""
        raise NotImplementedError

    def pin(self, ref: AdapterRef) -> None:
        """Load, and never a victim from now on.

        Raises NeverFitsError when a space would have no unpinned slot, or an accepted request would not fit.
        """

    def unpin(self, digest: str) -> None: ...
    def resident(self) -> tuple[ResidentEntry, ...]:
        raise NotImplementedError

    @property
    def stats(self) -> AdapterStats:
        raise NotImplementedError

    @property
    def num_leases(self) -> int:
        raise NotImplementedError

    @property
    def num_references(self) -> int:
        raise NotImplementedError

    def check_integrity(self) -> list[str]:
        raise NotImplementedError

    def close(self) -> None:
        """Stop the loader threads."""
