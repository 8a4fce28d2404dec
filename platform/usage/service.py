"""What was used, by whom: one row per request that ended, written in batches beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from dataclasses import asdict, dataclass, field
from datetime import datetime

from sqlalchemy import insert

from loraplex.platform.db.models import UsageRecord, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.errors import StorageError

FLUSH_INTERVAL_S = 2.0
BATCH_ROWS = 1000
MAX_BUFFERED_ROWS = 100_000  # some 50 MB: an outage of the database must not take the server with it

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, counted to the last token sent. `adapter` as it answered: name@3, or a mix."""

    tenant: str
    key_id: str
    request_id: str
    adapter: str | None
    digest: str | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    finish_reason: str
    at: datetime = field(default_factory=utc_now)


class UsageService:
    """Keeps records in memory until the next flush; `aclose` writes what is left."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._buffer: deque[Usage] = deque()
        self._num_lost = 0
        self._flusher: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()

    def start(self) -> None:
        self._flusher = asyncio.create_task(self._flush_forever(), name="usage")

    def record(self, usage: Usage) -> None:
        """Never waits. When the database has been away for very long, the oldest records give way, counted."""
        if len(self._buffer) >= MAX_BUFFERED_ROWS:
            self._buffer.popleft()
            self._num_lost += 1
        self._buffer.append(usage)

    async def flush(self) -> None:
        """Write everything recorded so far. Raises StorageError and keeps what is not written."""
        while self._buffer:
            batch = [self._buffer.popleft() for _ in range(min(BATCH_ROWS, len(self._buffer)))]
            await self._write(batch)
        if self._num_lost:
            logger.error("%d usage records were lost: the database was away too long", self._num_lost)
            self._num_lost = 0

    async def aclose(self) -> None:
        self._stopping.set()
        if self._flusher is not None:  # not cancelled: a write that is under way must not be repeated
            await self._flusher
        try:
            await self.flush()
        except StorageError as error:
            logger.error("%d usage records could not be written: %s", len(self._buffer), error)

    async def _flush_forever(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), FLUSH_INTERVAL_S)
            try:
                await self.flush()
            except StorageError as error:
                logger.warning("%d usage records wait for the database: %s", len(self._buffer), error)

    async def _write(self, batch: list[Usage]) -> None:
        """Write all of `batch` or put it back, also when cancelled."""
        is_written = False
        try:
            async with self._database.session() as session:
                await session.execute(insert(UsageRecord), [asdict(usage) for usage in batch])
            is_written = True
        finally:
            if not is_written:
                self._buffer.extendleft(reversed(batch))
