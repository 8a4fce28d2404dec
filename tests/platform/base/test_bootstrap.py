from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import func, select

from loraplex.platform.api_keys.bootstrap import bootstrap
from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.db.models import ApiKey
from loraplex.platform.db.session import Database
from loraplex.platform.errors import AuthenticationError
from loraplex.platform.installation import Installation, open_installation
from tests.platform.helpers import ADMIN_KEY, create_settings


async def num_keys(database: Database) -> int:
    async with database.read_session() as session:
        return await session.scalar(select(func.count()).select_from(ApiKey)) or 0


async def start(
    installation: Installation, data_dir: Path, *, terminal: io.StringIO | None = None, **given: object
) -> None:
    settings = create_settings(data_dir, **given)
    await bootstrap(settings, installation.database, installation.api_keys, terminal=terminal)


async def test_the_operators_key_becomes_the_admins_and_is_written_nowhere(data_dir: Path) -> None:
    async with open_installation(create_settings(data_dir)) as installation:
        await start(installation, data_dir, admin_key=ADMIN_KEY)
        principal = await installation.api_keys.authenticate(ADMIN_KEY)
        assert principal.is_platform_admin
    assert not (data_dir / "admin.key").exists()


async def test_a_generated_key_is_printed_to_a_terminal_only(data_dir: Path) -> None:
    terminal = io.StringIO()
    async with open_installation(create_settings(data_dir)) as installation:
        await start(installation, data_dir, terminal=terminal)
        secret = next(word for word in terminal.getvalue().split() if word.startswith("lpx_"))
        assert (await installation.api_keys.authenticate(secret)).scopes == {Scope.PLATFORM_ADMIN}
    assert not (data_dir / "admin.key").exists()


async def test_without_a_terminal_a_generated_key_is_written_for_us_only(data_dir: Path) -> None:
    async with open_installation(create_settings(data_dir)) as installation:
        await start(installation, data_dir)
        file = data_dir / "admin.key"
        assert (await installation.api_keys.authenticate(file.read_text().strip())).is_platform_admin
        assert file.stat().st_mode & 0o777 == 0o600


async def test_later_starts_make_no_key_whatever_they_are_given(data_dir: Path) -> None:
    async with open_installation(create_settings(data_dir)) as installation:
        await start(installation, data_dir, admin_key=ADMIN_KEY)
        await start(installation, data_dir, admin_key=ADMIN_KEY + "-another")
        await start(installation, data_dir, terminal=io.StringIO())
        assert await num_keys(installation.database) == 1
        with pytest.raises(AuthenticationError):
            await installation.api_keys.authenticate(ADMIN_KEY + "-another")


async def test_of_racing_starts_one_wins_and_its_key_is_the_one_told(data_dir: Path) -> None:
    async with open_installation(create_settings(data_dir)) as installation:
        terminals = [io.StringIO() for _ in range(8)]
        await asyncio.gather(*(start(installation, data_dir, terminal=terminal) for terminal in terminals))
        told = [terminal.getvalue() for terminal in terminals if terminal.getvalue()]
        assert len(told) == 1
        assert await num_keys(installation.database) == 1


async def test_of_racing_processes_on_an_empty_folder_one_wins(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from pathlib import Path; from tests.platform.helpers import create_settings\n"
        "from loraplex.platform.api_keys.bootstrap import bootstrap\n"
        "from loraplex.platform.installation import open_installation\n"
        "async def main():\n"
        "    settings = create_settings(Path(sys.argv[1]))\n"
        "    async with open_installation(settings) as opened:\n"
        "        await bootstrap(settings, opened.database, opened.api_keys)\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "data")]
    root = Path(__file__).parents[3]
    processes = [subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outcomes = [(process.communicate()[1], process.returncode) for process in processes]
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    async with open_installation(create_settings(tmp_path / "data")) as installation:
        assert await num_keys(installation.database) == 1
        secret = (tmp_path / "data" / "admin.key").read_text().strip()
        assert (await installation.api_keys.authenticate(secret)).is_platform_admin


async def test_a_key_file_that_cannot_be_written_leaves_the_installation_unbootstrapped(data_dir: Path) -> None:
    async with open_installation(create_settings(data_dir)) as installation:
        (data_dir / "admin.key").mkdir()
        with pytest.raises(OSError, match=r"admin\.key"):
            await start(installation, data_dir)
        assert await num_keys(installation.database) == 0
        (data_dir / "admin.key").rmdir()
        await start(installation, data_dir)
        assert await num_keys(installation.database) == 1
