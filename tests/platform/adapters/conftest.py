from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.platform.adapters.helpers import RegistryWorld, open_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegistryWorld]:
    async with open_world(tmp_path) as opened:
        yield opened
