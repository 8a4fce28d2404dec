"""What the engine core asks of the adapters' memory beyond residency. `adapters.manager.AdapterManager` fills it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.residency import AdapterResidency

if TYPE_CHECKING:  # the manager moves tensors; the core does without torch
    from loraplex.adapters.manager import AdapterStats, ResidentEntry


class AdapterControl(AdapterResidency, Protocol):
    """Control calls and gauges. Called from the step thread only; never blocks."""

    def pin(self, ref: AdapterRef) -> None:
        """Load, and never a victim from now on. Raises NeverFitsError when the pins would leave no free slot."""
        ...

    def unpin(self, digest: str) -> None: ...

    def unload(self, digest: str) -> bool:
        """Forget slots and host copy. False, and nothing changed, while a lease or a reference is on the digest."""
        ...

    def holding_loads(self) -> AbstractContextManager[None]:
        """While the block runs, one step's computation, no load works on another thread; before it, they may."""
        ...

    @property
    def is_copying(self) -> bool:
        """Whether `advance` has weights to copy right now, rather than to wait for."""
        ...

    def resident(self) -> Sequence[ResidentEntry]: ...

    def check_integrity(self) -> list[str]: ...

    @property
    def stats(self) -> AdapterStats: ...
