"""One database: its transactions and its migrations. SQLite in WAL mode, or PostgreSQL."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from loraplex.platform.db.engine import SQLITE_BUSY_TIMEOUT_MS, create_engine, normalize_url
from loraplex.platform.db.migrate import current_revision, migrate
from loraplex.platform.errors import StorageError
from loraplex.platform.settings import redact_url

logger = logging.getLogger(__name__)


class Database:
    """Hands out transactions. Belongs to one event loop; call `aclose` at the end."""

    def __init__(self, url: str) -> None:
        self.url = normalize_url(url)
        self._engine = create_engine(self.url)
        self._writers = asyncio.Lock() if self.url.get_backend_name() == "sqlite" else None
        # On SQLite a reader must not take the write lock, which every other transaction takes at its beginning.
        self._read_engine = self._engine.execution_options(loraplex_read_only=True)

    def __repr__(self) -> str:
        return f"Database({redact_url(self.url.render_as_string())})"

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """One transaction: committed when the block ends, rolled back on any exception, cancellation included.

        On SQLite it holds the write lock from its beginning, so what it reads stays true until it commits; never open
        one inside another. Raises StorageError if the database cannot be reached.
        """
        async with self._turn_to_write(), _unreachable_is_storage_error(), _connected(self._engine) as session:
            yield session
            await session.commit()

    @asynccontextmanager
    async def read_session(self) -> AsyncIterator[AsyncSession]:
        """A transaction that only reads, beside any writer, and is never committed. Raises StorageError."""
        async with _unreachable_is_storage_error(), _connected(self._read_engine) as session:
            yield session

    @asynccontextmanager
    async def _turn_to_write(self) -> AsyncIterator[None]:
        """SQLite has one writer. Who waits for it waits in line, and without a connection: readers find theirs."""
        if self._writers is None:
            yield
            return
        try:
            async with asyncio.timeout(SQLITE_BUSY_TIMEOUT_MS / 1000):
                await self._writers.acquire()
        except TimeoutError:
            raise StorageError("the database is too busy; try again") from None
        try:
            yield
        finally:
            self._writers.release()

    async def upgrade(self) -> None:
        """Bring the schema to this program's version. Processes that start at once wait for the first."""
        engine = create_engine(self.url, is_migration=True)
        try:
            async with _unreachable_is_storage_error(), _connected(engine) as session:
                await (await session.connection()).run_sync(migrate)
                await session.commit()
        finally:
            await engine.dispose()

    async def revision(self) -> str | None:
        """Of the schema as it is; None before the first upgrade."""
        async with self.read_session() as session:
            return await (await session.connection()).run_sync(current_revision)

    async def aclose(self) -> None:
        await self._engine.dispose()


@asynccontextmanager
async def _connected(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    """A session whose transaction has begun. Closing it rolls back what was not committed."""
    async with AsyncSession(engine, expire_on_commit=False) as session:
        try:
            await session.connection()
        except (OSError, DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:  # wrapped or not
            logger.error("database: %s", _first_line(error))
            raise StorageError("the database cannot be reached, or is too busy; try again") from error
        yield session


@asynccontextmanager
async def _unreachable_is_storage_error() -> AsyncIterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        logger.error("database: %s", _first_line(error))
        raise StorageError("the database cannot be reached, or is too busy; try again") from error
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise
        raise StorageError("the connection to the database was lost; try again") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
