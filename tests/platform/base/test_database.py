from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError

from loraplex.engine.errors import ConfigurationError
from loraplex.platform.db.models import ApiKey, AuditEvent, Base, Setting, Tenant, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.errors import StorageError


@asynccontextmanager
async def migrated(url: str) -> AsyncIterator[Database]:
    database = Database(url)
    try:
        await database.upgrade()
        yield database
    finally:
        await database.aclose()


async def add(database: Database, row: Base) -> None:
    async with database.session() as session:
        session.add(row)


async def write_and_fail(database: Database) -> None:
    async with database.session() as session:
        session.add(Setting(name="b", value="lost"))
        await session.flush()
        raise ZeroDivisionError


async def values(database: Database) -> list[str]:
    async with database.read_session() as session:
        return list((await session.scalars(select(Setting.value).order_by(Setting.name))).all())


async def test_a_session_commits_at_its_end_and_not_on_an_exception(empty_url: str) -> None:
    async with migrated(empty_url) as database:
        async with database.session() as session:
            session.add(Setting(name="a", value="kept"))
        with pytest.raises(ZeroDivisionError):
            await write_and_fail(database)
        assert await values(database) == ["kept"]


async def test_a_cancelled_session_leaves_nothing_and_no_lock(empty_url: str) -> None:
    async with migrated(empty_url) as database:
        is_inside = asyncio.Event()

        async def write() -> None:
            async with database.session() as session:
                session.add(Setting(name="a", value="lost"))
                await session.flush()
                is_inside.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(write())
        await is_inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with database.session() as session:
            session.add(Setting(name="b", value="kept"))
        assert await values(database) == ["kept"]


async def test_concurrent_read_modify_writes_lose_nothing_on_sqlite(sqlite_url: str) -> None:
    async with migrated(sqlite_url) as database:
        async with database.session() as session:
            session.add(Setting(name="n", value="0"))

        async def increment() -> None:
            async with database.session() as session:
                setting = await session.get_one(Setting, "n")
                await asyncio.sleep(0)
                setting.value = str(int(setting.value) + 1)

        await asyncio.gather(*(increment() for _ in range(40)))
        assert await values(database) == ["40"]


async def test_a_reader_sees_the_last_commit_beside_an_open_writer(sqlite_url: str) -> None:
    async with migrated(sqlite_url) as database, database.session() as session:
        session.add(Setting(name="a", value="not yet"))
        await session.flush()
        assert await values(database) == []


async def test_a_reader_commits_nothing(empty_url: str) -> None:
    async with migrated(empty_url) as database:
        async with database.read_session() as session:
            session.add(Setting(name="a", value="lost"))
            await session.flush()
        assert await values(database) == []


async def test_rows_go_with_their_tenant_and_audit_stays(empty_url: str) -> None:
    async with migrated(empty_url) as database:
        async with database.session() as session:
            tenant = Tenant(id="ten_1", name="acme", cache_salt=b"s" * 32)
            session.add(tenant)
            await session.flush()
            session.add(
                ApiKey(id="key_1", tenant_id="ten_1", name="k", key_hmac=b"h" * 32, prefix="lpx_12345678", scopes=[])
            )
            session.add(AuditEvent(actor="host", action="a", target="t", tenant="acme"))
        async with database.session() as session:
            await session.delete(await session.get_one(Tenant, "ten_1"))
        async with database.read_session() as session:
            assert await session.scalar(select(func.count()).select_from(ApiKey)) == 0
            assert await session.scalar(select(func.count()).select_from(AuditEvent)) == 1


async def test_a_violated_constraint_is_left_to_the_caller(empty_url: str) -> None:
    async with migrated(empty_url) as database:
        async with database.session() as session:
            session.add(Setting(name="a", value="x"))
        with pytest.raises(IntegrityError):
            await add(database, Setting(name="a", value="y"))


async def test_times_come_back_aware_and_equal(empty_url: str) -> None:
    now = utc_now()
    async with migrated(empty_url) as database:
        async with database.session() as session:
            session.add(Tenant(id="ten_1", name="acme", cache_salt=b"s" * 32, created_at=now))
        async with database.read_session() as session:
            assert (await session.get_one(Tenant, "ten_1")).created_at == now


async def test_sqlite_is_durable_concurrent_and_private(sqlite_url: str) -> None:
    async with migrated(sqlite_url) as database:
        async with database.read_session() as session:
            pragmas = [await session.scalar(text(f"PRAGMA {name}")) for name in ("journal_mode", "foreign_keys")]
        assert pragmas == ["wal", 1]
        assert Path(database.url.database or "").stat().st_mode & 0o777 == 0o600


async def test_an_unreachable_server_is_a_storage_error_that_tells_no_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = Database("postgresql://u:hush@127.0.0.1:1/x")
    with caplog.at_level(logging.DEBUG), pytest.raises(StorageError) as caught:
        async with database.session():
            pass
    assert "hush" not in caplog.text + caught.value.message


def test_a_file_that_cannot_be_made_is_a_configuration_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot make the database file"):
        Database("sqlite:////proc/no/such/file.db")


async def test_a_wrong_password_is_a_storage_error(postgres_url: str) -> None:
    database = Database(postgres_url.replace("postgres:@", "nobody:wrong@"))
    with pytest.raises(StorageError):
        async with database.read_session():
            pass


@pytest.mark.parametrize(
    "url", ["mysql://u:p@h/d", "no url", "sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"]
)
def test_a_database_that_cannot_work_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="database_url"):
        Database(url)


def test_libpqs_name_of_the_ssl_mode_is_understood() -> None:
    database = Database("postgres://u:hush@db/x?sslmode=require")
    assert database.url.query == {"ssl": "require"}
    assert repr(database) == "Database(postgresql+asyncpg://u:***@db/x)"


async def test_processes_that_start_at_once_migrate_once(empty_url: str) -> None:
    program = (
        "import asyncio, sys; from loraplex.platform.db.session import Database; "
        "asyncio.run(Database(sys.argv[1]).upgrade())"
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", program, empty_url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outcomes = [(process.communicate()[1], process.returncode) for process in processes]
    assert outcomes == [("", 0)] * 3
    async with migrated(empty_url) as database:
        assert await database.revision() == "0001"
