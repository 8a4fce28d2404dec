from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.helpers import make_adapter, make_checkpoint
from tests.platform.adapters.helpers import RegistryWorld, open_world
from tests.platform.adapters.serving import Serving, serving


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[RegistryWorld]:
    async with open_world(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="session")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of four adapters with different weights; the second is rsLoRA."""
    folders = [
        make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, seed=seed, use_rslora=seed == 1)
        for seed in range(4)
    ]
    return [{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in folders]


@pytest.fixture
async def served(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, checkpoint) as opened:
        yield opened
