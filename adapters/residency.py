"""What the scheduler asks of the adapters' memory. `adapters.manager.AdapterManager` fills it."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple, Protocol

from loraplex.adapters.errors import AdapterLoadError
from loraplex.adapters.ref import LoraSelection
from loraplex.kernels.lora.metadata import SelectionSlots


class Residency(Enum):
    RESIDENT = auto()  # every part is in its slots, leases taken
    LOADING = auto()  # leases taken, the weights are on their way
    NO_ROOM = auto()  # nothing was changed: every other slot is leased or pinned


class LoadFailure(NamedTuple):
    """A load that failed; concerns exactly the requests whose selection holds this digest."""

    digest: str
    error: AdapterLoadError


class AdapterResidency(Protocol):
    """References keep host copies, leases keep slots. Called from the step thread only; never blocks.

    A *reference* spans a request's life in the engine. A *lease* spans from the start of a load to the end of the
    request or its preemption. All calls are cheap; reading and checking files happens on loader threads.
    """

    def add_reference(self, selection: LoraSelection) -> None: ...

    def drop_reference(self, selection: LoraSelection) -> None: ...

    def check_fits(self, selection: LoraSelection) -> None:
        """Raise NeverFitsError when the selection needs more slots than the pool has beside the pinned ones."""
        ...

    def acquire(self, selection: LoraSelection) -> Residency:
        """Take leases on all slots of the selection in both spaces, evicting victims as needed, or none at all."""
        ...

    def release(self, selection: LoraSelection) -> None:
        """Give the leases back; weights stay as cache until they are victims."""
        ...

    def is_resident(self, selection: LoraSelection) -> bool:
        """True when every part is fully loaded (base: always)."""
        ...

    def slots(self, selection: LoraSelection) -> SelectionSlots:
        """Slots of a leased, resident selection."""
        ...

    def prefetch(self, selection: LoraSelection) -> None:
        """Begin to read the selection's files to host memory; takes no lease and may be ignored."""
        ...

    def advance(self) -> list[LoadFailure]:
        """Move a bounded piece of the pending loads into slots. Called between steps; returns new failures."""
        ...

    @property
    def has_pending_loads(self) -> bool: ...
