"""Bodies of uploads: counted while they stream, refused early, and never left behind."""

from __future__ import annotations

import asyncio
import resource
import shutil
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message

from loraplex.engine.frontend.protocol import EngineState
from loraplex.platform.adapters.multipart import MultipartFiles
from loraplex.platform.api_keys.principal import Scope
from tests.platform.adapters.helpers import RegistryWorld, adapter_files, multipart, open_world, zipped
from tests.platform.adapters.test_versions import assert_nothing_is_left

CHUNK = 16 * 1024
BOUNDARY = "b0undary"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"
HEAD = (
    f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="files"; filename="adapter_model.safetensors"\r\n\r\n'
).encode()


class EndlessBody:
    """Yields chunks for ever, and counts them."""

    def __init__(self, head: bytes = HEAD) -> None:
        self.num_bytes = 0
        self._head = head

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._head
        while True:
            self.num_bytes += CHUNK
            yield bytes(CHUNK)


@pytest.mark.parametrize("content_type", [MULTIPART, "application/zip"])
async def test_an_endless_body_ends_at_most_one_chunk_after_the_cap(tmp_path: Path, content_type: str) -> None:
    async with open_world(tmp_path, max_upload_bytes=256 * 1024) as world:
        body = EndlessBody()
        reply = await post(world, content=body, content_type=content_type)
        assert reply.status_code == 413
        lingering = 256 * 1024  # thrown away after the reply, so that the client hears it
        assert body.num_bytes <= 256 * 1024 + CHUNK + lingering + CHUNK
        await assert_nothing_is_left(world)


async def test_a_declared_length_over_the_cap_is_refused_before_the_body_is_parsed(tmp_path: Path) -> None:
    async with open_world(tmp_path, max_upload_bytes=1024) as world:
        reply = await world.upload("sql", {"adapter_model.safetensors": bytes(4096)})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "payload_too_large")
        assert "1024" in reply.json()["error"]["message"]
        await assert_nothing_is_left(world)


@pytest.mark.parametrize("key", ["none", "revoked", "read-only"])
async def test_an_endless_body_without_a_right_key_is_hardly_read(world: RegistryWorld, key: str) -> None:
    headers = {}
    if key == "revoked":
        headers = await world.base.key(Scope.ADAPTERS_WRITE, tenant=world.tenant)
        keys = await world.base.installation.api_keys.list(world.tenant, after=None, limit=100)
        for one in keys:
            await world.base.installation.api_keys.revoke(one.id, world.tenant, actor="test")
    elif key == "read-only":
        headers = await world.base.key(Scope.ADAPTERS_READ, tenant=world.tenant)
    body = EndlessBody()
    reply = await world.client.post(
        world.url("sql", "/versions"), content=body, headers={**headers, "content-type": MULTIPART}
    )
    assert reply.status_code == (403 if key == "read-only" else 401)
    assert body.num_bytes < 1 << 20
    assert world.temporary_files() == []


async def test_an_upload_before_the_engine_is_ready_is_a_503_before_its_body_is_read(world: RegistryWorld) -> None:
    world.engine.state = EngineState.STARTING
    body = EndlessBody()
    reply = await post(world, content=body, content_type=MULTIPART)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert body.num_bytes < 1 << 20
    await assert_nothing_is_left(world)


@pytest.mark.parametrize(
    "body",
    [{"source": "http://169.254.169.254/latest"}, {"url": "https://example.org/a"}, {"hf_id": "org/name"}],
)
async def test_a_body_that_asks_the_server_to_fetch_is_no_upload(world: RegistryWorld, body: dict[str, str]) -> None:
    reply = await world.client.post(world.url("sql", "/versions"), json=body, headers=world.headers)
    assert reply.status_code == 415
    assert "nothing is fetched" in reply.json()["error"]["message"]
    form = await world.client.post(
        world.url("sql", "/versions"),
        data=body,
        files=multipart(adapter_files()),
        headers=world.headers,
    )
    assert form.status_code == 400
    await assert_nothing_is_left(world)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "ends before"),
        (b"no boundary at all", "malformed"),
        (HEAD + b"cut off", "ends before"),
        (HEAD.replace(b'name="files"', b'name="file"') + b"x", "not known"),
        (HEAD.replace(b"; filename=", b"; nofile=") + b"x", "no file name"),
        (HEAD.replace(b"adapter_model", b"\xff\xfe") + b"x", "not UTF-8"),
        (f"--{BOUNDARY}\r\n".encode() + b"x-filler: 1\r\n" * 100, "malformed"),
        (f"--{BOUNDARY}\r\nx-long: ".encode() + b"a" * 100_000, "malformed"),
        (f"--{BOUNDARY}--\r\n".encode(), "no file"),
    ],
)
async def test_a_malformed_multipart_body_is_a_400(world: RegistryWorld, content: bytes, expected: str) -> None:
    reply = await post(world, content=content, content_type=MULTIPART)
    assert reply.status_code == 400
    assert expected in reply.json()["error"]["message"]
    await assert_nothing_is_left(world)


async def test_a_file_that_comes_twice_is_a_400(world: RegistryWorld) -> None:
    twice = multipart(adapter_files()) + multipart({"adapter_config.json": b"{}"})
    reply = await world.client.post(world.url("sql", "/versions"), files=twice, headers=world.headers)
    assert (reply.status_code, "comes twice" in reply.json()["error"]["message"]) == (400, True)
    await assert_nothing_is_left(world)


async def test_more_files_than_any_adapter_has_are_a_400(world: RegistryWorld) -> None:
    reply = await world.upload("sql", {f"note-{number}.txt": b"" for number in range(300)})
    assert (reply.status_code, "256" in reply.json()["error"]["message"]) == (400, True)


async def test_a_zip_beside_files_is_a_400(world: RegistryWorld) -> None:
    reply = await world.upload("sql", adapter_files() | {"more.zip": zipped(adapter_files())})
    assert reply.status_code == 400
    await assert_nothing_is_left(world)


async def test_a_zip_that_unpacks_beyond_the_cap_is_refused(tmp_path: Path) -> None:
    async with open_world(tmp_path, max_upload_bytes=64 * 1024) as world:
        reply = await world.upload("sql", {"adapter.zip": zipped({"adapter_model.safetensors": bytes(1 << 20)})})
        assert reply.status_code == 422
        await assert_nothing_is_left(world)


@pytest.mark.parametrize("encoding", ["gzip", "br"])
async def test_an_encoded_body_is_refused(world: RegistryWorld, encoding: str) -> None:
    reply = await world.client.post(
        world.url("sql", "/versions"),
        content=b"\x1f\x8b",
        headers=world.headers | {"content-type": "application/zip", "content-encoding": encoding},
    )
    assert reply.status_code == 415


async def test_uploads_together_stay_within_the_quota(tmp_path: Path) -> None:
    async with open_world(tmp_path, max_upload_bytes=256 * 1024) as world:
        held = asyncio.Event()

        async def held_body() -> AsyncIterator[bytes]:
            yield HEAD + bytes(200 * 1024)
            await held.wait()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(post(world, content=held_body(), content_type=MULTIPART)) for _ in range(12)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert {task.result().status_code for task in done} == {503}
            held.set()
        assert sorted(task.result().status_code for task in tasks)[-1] == 503
        assert (await world.upload("sql")).status_code == 201, "the quota is given back"


async def test_a_client_that_goes_away_leaves_nothing(world: RegistryWorld) -> None:
    messages: list[Message] = [
        {"type": "http.request", "body": HEAD + bytes(CHUNK), "more_body": True},
        {"type": "http.disconnect"},
    ]
    seen: list[list[str]] = []

    async def receive() -> Message:
        seen.append(world.temporary_files())
        return messages.pop(0)

    async def send(message: Message) -> None:
        pass

    await world.base.app(upload_scope(world), receive, send)
    assert seen == [[], ["adapter_model.safetensors"]], "the first chunk was on disk when the client went away"
    await assert_nothing_is_left(world)


async def test_a_cancelled_upload_leaves_nothing(world: RegistryWorld) -> None:
    is_reading = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield HEAD + bytes(CHUNK)
        is_reading.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(post(world, content=body(), content_type=MULTIPART))
    await is_reading.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await assert_nothing_is_left(world)


async def test_the_event_loop_writes_no_file(world: RegistryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    write = MultipartFiles.write

    def recorded(files: MultipartFiles, chunk: bytes) -> None:
        threads.add(threading.current_thread())
        write(files, chunk)

    monkeypatch.setattr(MultipartFiles, "write", recorded)
    await world.upload("sql")
    assert threads
    assert threading.current_thread() not in threads


async def post(
    world: RegistryWorld, *, content: bytes | AsyncIterator[bytes] | EndlessBody, content_type: str
) -> httpx.Response:
    return await world.client.post(
        world.url("sql", "/versions"), content=content, headers=world.headers | {"content-type": content_type}
    )


def upload_scope(world: RegistryWorld) -> dict[str, object]:
    path = world.url("sql", "/versions")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", MULTIPART.encode()),
            (b"transfer-encoding", b"chunked"),
            *((name.encode(), value.encode()) for name, value in world.headers.items()),
        ],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }


@pytest.mark.parametrize("content_type", [MULTIPART, "application/zip"])
async def test_a_full_disk_is_a_503_and_leaves_nothing(world: RegistryWorld, content_type: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield HEAD if content_type == MULTIPART else b""
        for _ in range(60):
            yield bytes(5_000)  # shorter than a file's buffer, so that closing writes too

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (99_000, hard))  # no file of this process grows beyond
    try:
        reply = await post(world, content=body(), content_type=content_type)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_error")
    await assert_nothing_is_left(world)


async def test_a_folder_of_uploads_that_is_gone_is_a_503(world: RegistryWorld) -> None:
    shutil.rmtree(world.data_dir / "uploads")
    reply = await world.upload("sql")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "storage_error")


@pytest.mark.parametrize("field", ["base_model_name_or_path", "\ud800"])
async def test_a_config_with_half_a_character_is_refused(world: RegistryWorld, field: str) -> None:
    config: dict[str, Any] = {field: "\ud800"}
    reply = await world.upload("sql", adapter_files(**config))
    assert reply.status_code == 422
    assert "lone surrogate" in reply.json()["error"]["message"]
    await assert_nothing_is_left(world)
