"""How many requests are being served, whatever they ask for: what a server that shuts down waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RequestsInProgress:
    def __init__(self) -> None:
        self._num = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def __len__(self) -> int:
        return self._num

    @contextmanager
    def track(self) -> Iterator[None]:
        self._num += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num -= 1
            if not self._num:
                self._is_idle.set()

    async def wait_idle(self) -> None:
        await self._is_idle.wait()
