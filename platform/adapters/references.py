"""Who still runs through a version: its removal waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable


class References:
    """Counts accepted requests per version id. A version without requests takes no memory here."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._drained: dict[str, asyncio.Event] = {}

    def add(self, version_ids: Iterable[str]) -> None:
        self._counts.update(version_ids)

    def drop(self, version_ids: Iterable[str]) -> None:
        for version_id in version_ids:
            self._counts[version_id] -= 1
            if self._counts[version_id] == 0:
                del self._counts[version_id]
                if version_id in self._drained:
                    self._drained.pop(version_id).set()

    def count(self, version_id: str) -> int:
        return self._counts.get(version_id, 0)

    async def wait_drained(self, version_id: str) -> None:
        """Return when no request holds the version. The caller has seen to it that no new one comes."""
        while self.count(version_id):
            await self._drained.setdefault(version_id, asyncio.Event()).wait()
