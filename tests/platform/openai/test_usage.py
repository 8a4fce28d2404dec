"""Usage records reach the database, also when it was away for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import UsageRecord
from loraplex.platform.db.session import Database
from loraplex.platform.errors import StorageError
from loraplex.platform.usage import service
from loraplex.platform.usage.service import Usage, UsageService
from tests.platform.helpers import open_database


def usage(request_id: str) -> Usage:
    return Usage(
        tenant="acme",
        key_id="key",
        request_id=request_id,
        adapter="sql@1",
        digest="d" * 64,
        prompt_tokens=3,
        cached_tokens=1,
        completion_tokens=5,
        finish_reason="stop",
    )


async def num_rows(database: Database) -> int:
    async with database.read_session() as session:
        return (await session.execute(select(func.count()).select_from(UsageRecord))).scalar_one()


async def test_closing_writes_what_is_left(tmp_path: Path) -> None:
    async with open_database(tmp_path) as database:
        usage_service = UsageService(database)
        usage_service.start()
        for index in range(2500):
            usage_service.record(usage(f"r{index}"))
        await usage_service.aclose()
        assert await num_rows(database) == 2500


class AwayDatabase(Database):
    """Cannot be reached while `is_away`."""

    is_away = True

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        if self.is_away:
            raise StorageError("away")
        async with super().session() as session:
            yield session


async def test_records_wait_for_a_database_that_is_away_in_their_order(tmp_path: Path) -> None:
    async with open_database(tmp_path) as database:
        away = AwayDatabase(f"sqlite:///{tmp_path / 'loraplex.db'}")
        usage_service = UsageService(away)
        usage_service.record(usage("first"))
        with pytest.raises(StorageError):
            await usage_service.flush()
        usage_service.record(usage("second"))
        away.is_away = False
        await usage_service.flush()
        async with database.read_session() as session:
            ids = (await session.scalars(select(UsageRecord.request_id).order_by(UsageRecord.id))).all()
        assert ids == ["first", "second"]
        await away.aclose()


async def test_memory_is_bounded_and_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service, "MAX_BUFFERED_ROWS", 2)
    async with open_database(tmp_path) as database:
        usage_service = UsageService(database)
        for request_id in ("lost", "kept", "kept too"):
            usage_service.record(usage(request_id))
        await usage_service.flush()
        assert await num_rows(database) == 2
    assert "1 usage records were lost" in caplog.text
