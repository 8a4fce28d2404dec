"""What the engine core asks of the adapters' memory beyond residency. `adapters.manager.AdapterManager` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.residency import AdapterResidency


class ResidentFacts(Protocol):
    """One adapter version that has slots."""

    @property
    def digest(self) -> str: ...

    @property
    def num_attention_slots(self) -> int: ...

    @property
    def num_mlp_slots(self) -> int: ...

    @property
    def leases(self) -> int: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def is_loading(self) -> bool: ...


class AdapterControl(AdapterResidency, Protocol):
    """Control calls and gauges. Called from the step thread only; never blocks."""

    def pin(self, ref: AdapterRef) -> None:
        """Never a victim from now on. Raises NeverFitsError when the pins would leave no free slot in a space."""
        ...

    def unpin(self, digest: str) -> None: ...

    def unload(self, digest: str) -> bool:
        """Forget slots and host copy. False, and nothing changed, while a lease or a reference is on the digest."""
        ...

    def resident(self) -> Sequence[ResidentFacts]: ...

    def check_integrity(self) -> list[str]: ...

    @property
    def num_slots(self) -> int:
        """Slots in each of the two spaces."""
        ...

    @property
    def num_leases(self) -> int: ...

    @property
    def num_references(self) -> int: ...

    @property
    def num_pending_loads(self) -> int: ...

    @property
    def total_loads(self) -> int: ...

    @property
    def total_evictions(self) -> int: ...
