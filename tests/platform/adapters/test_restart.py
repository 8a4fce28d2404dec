"""What a server finds after it was stopped or killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

from sqlalchemy import select, update

from loraplex.platform.adapters.repository import UPLOADING
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.adapters.upload_space import UploadSpace
from loraplex.platform.db.models import AdapterVersion
from tests.platform.adapters.helpers import RecordingEngine, adapter_files, open_platform, open_registry

UPLOAD_AND_HANG = """
import asyncio, sys
from pathlib import Path
from loraplex.platform.adapters.upload_space import UploadSpace

async def main():
    space = UploadSpace(Path(sys.argv[1]), max_upload_bytes=1 << 20)
    space.open()
    async with space.allocate() as area:
        (area.files / "adapter_model.safetensors").write_bytes(bytes(100_000))
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base, open_registry(base, tmp_path) as world:
        digests = [(await world.upload(f"a{n}", adapter_files(seed=n))).json()["digest"] for n in range(5)]
        await world.call("PUT", "a0", "/versions/1/pin")
    async with open_platform(tmp_path) as base, open_registry(base, tmp_path, engine=RecordingEngine()) as world:
        assert world.engine.calls == [], "weights are read lazily"
        await world.registry.repin()
        assert world.engine.pinned == {digests[0]}
        resolved = [
            await world.registry.resolve(world.tenant, [RequestedAdapter(name=f"a{number}")]) for number in range(5)
        ]
        assert [one.adapters[0].digest for one in resolved] == digests


def test_uploads_of_a_killed_process_are_removed_and_those_of_a_living_one_are_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", UPLOAD_AND_HANG, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        beside = UploadSpace(tmp_path, max_upload_bytes=1 << 20)
        beside.open()
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1, "the other server is alive"
        beside.close()
        process.send_signal(signal.SIGKILL)
    after = UploadSpace(tmp_path, max_upload_bytes=1 << 20)
    after.open()
    assert list(tmp_path.rglob("*.safetensors")) == []
    after.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_version_whose_upload_was_cut_short_is_gone(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql", adapter_files(seed=1))
            kept = world.stored_objects()
            await world.upload("sql", adapter_files(seed=2))
            async with base.installation.database.session() as session:  # killed before the version became ready
                cut_short = update(AdapterVersion).where(AdapterVersion.number == 2).values(status=UPLOADING)
                await session.execute(cut_short)
            (tmp_path / "store" / "blobs" / ("0" * 64 + "#1")).write_bytes(b"half")
        async with open_registry(base, tmp_path) as world:
            await world.registry.wait_removed()
            assert world.stored_objects() == kept
            assert (await world.call("GET", "sql")).json()["versions"] == [1]
            assert (await world.upload("sql", adapter_files(seed=3))).json()["version"] == 3


async def test_a_removal_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql")
            async with world.registry.hold(await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])):
                await world.call("DELETE", "sql")
                await world.registry.aclose()  # with the request still running
            assert world.stored_objects() != []
        async with open_registry(base, tmp_path) as world:
            await world.registry.wait_removed()
            assert world.stored_objects() == []
            async with base.installation.database.read_session() as session:
                assert (await session.scalars(select(AdapterVersion))).all() == []


async def test_an_upload_that_ended_in_a_crash_is_absent(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            upload = asyncio.create_task(world.upload("sql"))
            await asyncio.sleep(0)
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)
        async with open_registry(base, tmp_path) as world:
            await world.registry.wait_removed()
            assert world.stored_objects() == []
            assert world.temporary_files() == []
            assert (await world.upload("sql")).json()["status"] == "ready"
