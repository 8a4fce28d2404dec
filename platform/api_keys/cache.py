"""Remembers who holds a key, so that a request costs no SQL. Small, short-lived, and never staler than a revocation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from loraplex.platform.api_keys.principal import Principal
from loraplex.platform.db.models import utc_now

LIFETIME_S = 2.0  # how long a revocation by another process may go unnoticed
CAPACITY = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    principal: Principal
    expires_at: datetime | None
    stale_at: float  # monotonic seconds


class PrincipalCache:
    """Bounded, least recently used first.

    `generation` counts the forgettings. A look-up that began before one must not store what it found: it may have
    read the key just before it was revoked.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._clock = clock
        self.generation = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, digest: bytes) -> Principal | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if entry.stale_at <= self._clock() or (entry.expires_at is not None and entry.expires_at <= utc_now()):
            del self._entries[digest]
            return None
        self._entries.move_to_end(digest)
        return entry.principal

    def put(self, digest: bytes, principal: Principal, *, expires_at: datetime | None, generation: int) -> None:
        if generation != self.generation:
            return
        stale_at = self._clock() + LIFETIME_S
        self._entries[digest] = _Entry(principal=principal, expires_at=expires_at, stale_at=stale_at)
        if len(self._entries) > CAPACITY:
            self._entries.popitem(last=False)

    def forget(self, is_affected: Callable[[Principal], bool]) -> None:
        self.generation += 1
        for digest in [digest for digest, entry in self._entries.items() if is_affected(entry.principal)]:
            del self._entries[digest]
