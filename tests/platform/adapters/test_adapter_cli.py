"""`loraplex adapter` against a running server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from loraplex.platform.cli.adapter import app
from tests.platform.adapters.helpers import RegistryWorld, adapter_files, zipped
from tests.platform.helpers import serve


class Cli:
    """Runs commands as a user of the world's tenant would."""

    def __init__(self, url: str, key: str) -> None:
        self._options = ["--tenant", "acme", "--url", url]
        self._environment = {"LORAPLEX_API_KEY": key, "COLUMNS": "200"}

    async def run(self, *arguments: object) -> Result:
        command = [str(argument) for argument in arguments]
        options, environment = self._options, self._environment
        return await asyncio.to_thread(lambda: CliRunner().invoke(app, [*command, *options], env=environment))


@pytest.fixture
async def cli(world: RegistryWorld) -> AsyncIterator[Cli]:
    async with serve(world.base.app) as port:
        yield Cli(f"http://127.0.0.1:{port}", world.headers["authorization"].removeprefix("Bearer "))


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


async def test_push_uploads_what_belongs_to_the_adapter(cli: Cli, world: RegistryWorld, tmp_path: Path) -> None:
    junk = {"optimizer.pt": bytes(1000), "README.md": b"#", "training_args.bin": b"\x80"}
    pushed = await cli.run("push", write(tmp_path / "a", adapter_files() | junk), "--name", "sql")
    assert (pushed.exit_code, pushed.stdout.strip()) == (0, "sql@1")
    files = (await world.call("GET", "sql", "/versions/1")).json()["files"]
    assert [file["name"] for file in files] == ["adapter_config.json", "adapter_model.safetensors"]


async def test_push_takes_a_zip_and_the_folder_that_peft_names(cli: Cli, tmp_path: Path) -> None:
    archive = tmp_path / "adapter.zip"
    archive.write_bytes(zipped(adapter_files(seed=1)))
    assert (await cli.run("push", archive, "--name", "sql")).stdout.strip() == "sql@1"
    write(tmp_path / "named" / "tenantA", adapter_files(seed=2))
    assert (await cli.run("push", tmp_path / "named", "--name", "sql")).stdout.strip() == "sql@2"


async def test_push_prints_every_reason_and_fails(cli: Cli, tmp_path: Path) -> None:
    folder = write(tmp_path / "a", adapter_files(use_qalora=True, layer_replication=[[0, 2]]))
    refused = await cli.run("push", folder, "--name", "sql")
    assert refused.exit_code == 1
    assert "refuses the adapter, for 2 reasons" in refused.stderr
    assert "use_qalora" in refused.stderr
    assert "layer_replication" in refused.stderr


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"model.safetensors": b""}, "has no adapter_config.json"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b"\x80"}, "safe_serialization=True"),
    ],
)
async def test_push_of_what_is_no_adapter_says_so_without_a_server(
    cli: Cli, tmp_path: Path, files: dict[str, bytes], expected: str
) -> None:
    refused = await cli.run("push", write(tmp_path / "a", files), "--name", "sql")
    assert (refused.exit_code, expected in refused.stderr) == (1, True)


async def test_list_alias_and_delete(cli: Cli, tmp_path: Path) -> None:
    for seed in (1, 2):
        await cli.run("push", write(tmp_path / str(seed), adapter_files(seed=seed)), "--name", "sql")
    assert (await cli.run("alias", "sql", "prod", 2)).stdout.strip() == "sql@prod -> sql@2"
    assert (await cli.run("list")).stdout == "sql\t1, 2\tdefault=1, prod=2\n"
    stuck = await cli.run("delete", "sql@2", "--yes")
    assert (stuck.exit_code, "prod" in stuck.stderr) == (1, True)
    assert (await cli.run("delete", "sql", "--yes")).exit_code == 0
    assert (await cli.run("list")).stdout == ""


async def test_delete_asks_first(cli: Cli, tmp_path: Path) -> None:
    await cli.run("push", write(tmp_path / "a", adapter_files()), "--name", "sql")
    assert (await cli.run("delete", "sql")).exit_code == 1
    assert "sql" in (await cli.run("list")).stdout


@pytest.mark.parametrize("name", ["sql@prod", "../etc"])
async def test_delete_takes_an_adapter_or_a_version_only(cli: Cli, name: str) -> None:
    assert (await cli.run("delete", name, "--yes")).exit_code == 1


async def test_a_server_that_is_away_is_one_clear_line(tmp_path: Path) -> None:
    away = await Cli("http://127.0.0.1:1", "lpx_" + "x" * 43).run("list")
    assert (away.exit_code, away.stderr.count("\n")) == (1, 1)
    assert "does not answer" in away.stderr
