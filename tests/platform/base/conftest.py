"""Databases of each kind, empty or migrated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.platform.helpers import copy_migrated


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
