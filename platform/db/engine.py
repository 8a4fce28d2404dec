"""SQLAlchemy engines set up for what we need from each database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from loraplex.engine.errors import ConfigurationError

SQLITE_BUSY_TIMEOUT_MS = 30_000

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgres": "postgresql+asyncpg",
    "postgresql": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}


def normalize_url(url: str) -> URL:
    """The URL with our driver, as people write it for other tools too. Raises ConfigurationError."""
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ConfigurationError("database_url is not a URL; " + _EXAMPLES, param="database_url") from None
    if parsed.drivername not in _DRIVERS:
        raise ConfigurationError(f"database_url is of kind {parsed.drivername!r}; {_EXAMPLES}", param="database_url")
    parsed = parsed.set(drivername=_DRIVERS[parsed.drivername])
    if parsed.get_backend_name() == "sqlite":
        if parsed.database in (None, "", ":memory:") or "memory" in parsed.query.values():
            raise ConfigurationError(f"database_url names no file; {_EXAMPLES}", param="database_url")
        return parsed
    return _with_asyncpg_ssl(parsed)


_EXAMPLES = "give sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME"


def create_engine(url: URL, *, is_migration: bool = False) -> AsyncEngine:
    """An engine for a normalized URL.

    Transactions on SQLite begin IMMEDIATE, except with the execution option `loraplex_read_only`. A migration runs
    without foreign keys, because rebuilding a table (drop and rename) would cascade into the tables that refer to it.
    """
    if url.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True, **_pool(is_migration))
    _create_private(Path(url.database or ""))
    engine = create_async_engine(url, connect_args={"isolation_level": None}, **_pool(is_migration))
    pragmas = [f"busy_timeout={SQLITE_BUSY_TIMEOUT_MS}", f"foreign_keys={'OFF' if is_migration else 'ON'}"]

    @event.listens_for(engine.sync_engine, "connect")
    def set_pragmas(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        cursor = connection.cursor()
        for pragma in [*pragmas, "journal_mode=WAL", "synchronous=FULL"]:
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def begin(connection: Connection) -> None:
        is_read_only = connection.get_execution_options().get("loraplex_read_only", False)
        connection.exec_driver_sql("BEGIN" if is_read_only else "BEGIN IMMEDIATE")

    return engine


def _pool(is_migration: bool) -> dict[str, Any]:
    return {"poolclass": NullPool} if is_migration else {}


def _create_private(path: Path) -> None:
    """Only our user may read hashes of keys and salts; SQLite gives its side files the same mode."""
    try:
        path.absolute().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"cannot make the database file {path}: {error.strerror}", param="data_dir") from error


def _with_asyncpg_ssl(url: URL) -> URL:
    """asyncpg calls libpq's `sslmode` `ssl`."""
    if "sslmode" not in url.query:
        return url
    mode = url.query["sslmode"]
    return url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
