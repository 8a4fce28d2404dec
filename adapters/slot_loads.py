"""Brings the weights of versions into slots they were given: source -> host memory -> slots.

A version that holds slots is in exactly one state:

    awaited -> copying -> ready      awaited: its files are being read on a loader thread, or lie in host memory
       |                             copying: `advance` writes it into its slots piece by piece
       v                             ready:   complete
    failed                           failed:  could not be read; waits for its owner to give the slots back

Loader threads end at host memory; only the thread that calls `advance` touches slots. So a slot that changes hands
in the middle of a load cannot receive the old owner's weights.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator

from loraplex.adapters.errors import AdapterLoadError
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.host_loader import HostLoader
from loraplex.adapters.residency import LoadFailure
from loraplex.adapters.slot_pool import Slots
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.adapters.weights import AdapterWeights

logger = logging.getLogger(__name__)

_PIECES_PER_CALL = 8
_MAX_PREFETCHES = 64


class SlotLoads:
    def __init__(self, tensors: SlotTensors, host: HostCache, loader: HostLoader, *, max_copy_bytes: int) -> None:
        self._tensors = tensors
        self._host = host
        self._loader = loader
        self._max_copy_bytes = max_copy_bytes
        self._awaited: dict[str, Slots] = {}
        self._copying: dict[str, Iterator[int]] = {}  # in the order in which they are copied
        self._ready: set[str] = set()
        self._failed: set[str] = set()
        self._to_prefetch: dict[str, None] = {}  # in the order of asking
        self.total_loads = 0

    @property
    def under_way(self) -> frozenset[str]:
        """Versions with slots whose weights are on their way."""
        return frozenset(self._awaited) | self._copying.keys()

    @property
    def num_pending(self) -> int:
        """Loads under way and reads without slots (prefetches)."""
        return len(self.under_way | set(self._loader.loading))

    @property
    def is_copying(self) -> bool:
        """Whether `advance` has something to copy right now."""
        return bool(self._copying)

    def is_ready(self, digest: str) -> bool:
        return digest in self._ready

    def is_failed(self, digest: str) -> bool:
        return digest in self._failed

    def begin(self, digest: str, slots: Slots) -> None:
        """Fill `slots`, also when a former try failed."""
        self._failed.discard(digest)
        self._awaited[digest] = slots
        if digest not in self._host:
            self._loader.start(digest)

    def forget(self, digest: str) -> None:
        """The version lost its slots. A read under way goes on, for the host cache."""
        self._awaited.pop(digest, None)
        self._copying.pop(digest, None)
        self._ready.discard(digest)
        self._failed.discard(digest)

    def forget_host_copy(self, digest: str) -> None:
        self._loader.discard(digest)
        self._host.remove(digest)

    def prefetch(self, digest: str) -> None:
        """Read into the host cache as soon as that leaves a loader thread to the loads that requests wait for."""
        if len(self._to_prefetch) < _MAX_PREFETCHES:
            self._to_prefetch[digest] = None

    def advance(self, *, budget_s: float = 0.0) -> list[LoadFailure]:
        """Take in what was read, then copy at most `max_copy_bytes` (or one rank row, if that is more).

        So much again and again while `budget_s` seconds last.
        """
        failures = self._collect_reads() + self._begin_cached()
        self._start_prefetches()
        deadline = time.perf_counter() + budget_s
        self._copy_pieces()
        while self._copying and time.perf_counter() < deadline:
            self._copy_pieces()
        return failures

    def check_integrity(self, holders: set[str]) -> list[str]:
        """Faults of the states, given the digests that hold slots."""
        states = Counter([*self._awaited, *self._copying, *self._ready, *self._failed])
        faults = [f"{digest} is in {num} states" for digest, num in states.items() if num > 1]
        faults += [f"{digest} has slots or a load, but not both" for digest in holders ^ states.keys()]
        return faults

    def _collect_reads(self) -> list[LoadFailure]:
        failures = []
        for digest, outcome in self._loader.poll():
            if isinstance(outcome, AdapterLoadError):
                if digest in self._awaited:
                    failures.append(self._fail(digest, outcome))
                continue
            if digest not in self._host:
                self._host.put(digest, outcome)  # what finds no room there is copied all the same, and then forgotten
            if digest in self._awaited:
                failures += self._begin_copy(digest, outcome)
        return failures

    def _begin_cached(self) -> list[LoadFailure]:
        """Awaited versions that are in host memory already; those that left it meanwhile are read again."""
        failures = []
        for digest in list(self._awaited):
            weights = self._host.get(digest)
            if weights is not None:
                failures += self._begin_copy(digest, weights)
            else:
                self._loader.start(digest)
        return failures

    def _start_prefetches(self) -> None:
        while self._to_prefetch and self._loader.has_spare_thread:
            digest = next(iter(self._to_prefetch))
            del self._to_prefetch[digest]
            is_there = digest in self._host or digest in self._ready or digest in self.under_way
            if not is_there and self._host.references(digest):
                self._loader.start(digest)

    def _begin_copy(self, digest: str, weights: AdapterWeights) -> list[LoadFailure]:
        slots = self._awaited[digest]
        fault = self._tensors.misfit(weights, slots)
        if fault is not None:
            return [self._fail(digest, AdapterLoadError(f"version {digest} {fault}"))]
        del self._awaited[digest]
        piece_bytes = self._max_copy_bytes // _PIECES_PER_CALL
        self._copying[digest] = self._tensors.write(weights, slots, max_piece_bytes=piece_bytes)
        return []

    def _fail(self, digest: str, error: AdapterLoadError) -> LoadFailure:
        del self._awaited[digest]
        self._failed.add(digest)
        return LoadFailure(digest, error)

    def _copy_pieces(self) -> None:
        num_bytes, largest = 0, 0
        while self._copying and num_bytes + largest <= self._max_copy_bytes:
            digest = next(iter(self._copying))
            copied = next(self._copying[digest], None)
            if copied is None:
                self._publish(digest)
            else:
                num_bytes += copied
                largest = max(largest, copied)

    def _publish(self, digest: str) -> None:
        del self._copying[digest]
        self._ready.add(digest)
        self.total_loads += 1
        logger.info("adapter loaded: %s", digest)
