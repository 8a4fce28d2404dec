"""OP-01: kill -9 of a server in the middle of an upload, and what the next one finds."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import psutil

from tests.e2e.server import Server, running_server, wait_until

FLAGS = ("--adapter-slots", "16", "--kv-cache-memory-gib", "0.05")
NAMES = ("a1", "a3", "a4", "a6", "a7")
PINNED = "a4"
ADAPTERS = "/api/v1/tenants/acme/adapters"


def half_uploads(data_dir: Path) -> list[Path]:
    return [path for path in (data_dir / "uploads").rglob("*") if path.is_file() and path.name != "lock"]


def begin_upload(server: Server, key: str) -> socket.socket:
    """Send the head of a chunked zip and 64 KiB of it, and no end."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST {ADAPTERS}/sixth/versions HTTP/1.1\r\nhost: {host}\r\nauthorization: {key}\r\n"
    head += "content-type: application/zip\r\ntransfer-encoding: chunked\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + b"10000\r\n" + bytes(0x10000) + b"\r\n")
    return connection


def answers(client: httpx.Client) -> dict[str, str]:
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
    replies = {name: client.post("/v1/completions", json=body | {"lora": name}) for name in NAMES}
    return {name: reply.raise_for_status().json()["choices"][0]["text"] for name, reply in replies.items()}


def test_a_server_killed_during_an_upload_comes_back_with_all_that_it_had_acknowledged(
    model: Path, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(model, tmp_path, *FLAGS) as server, server.create_tenant("acme") as client:
        digests = {name: server.upload("acme", name, adapter_folders[name])["digest"] for name in NAMES}
        before = answers(client)
        client.put(f"{ADAPTERS}/{PINNED}/versions/1/pin").raise_for_status()
        key, engine = client.headers["authorization"], server.engine
        with begin_upload(server, key):
            wait_until(lambda: half_uploads(tmp_path), "half uploaded")
            server.process.kill()
            server.wait()
        psutil.wait_procs([engine], timeout=30)
    assert half_uploads(tmp_path) != []

    with (
        running_server(model, tmp_path, *FLAGS) as server,
        httpx.Client(base_url=server.url, headers={"authorization": key}, timeout=60) as client,
    ):
        assert half_uploads(tmp_path) == []
        resident = server.api.get("/api/v1/engine").json()["stats"]["resident"]
        assert [(one["digest"], one["pinned"]) for one in resident] == [(digests[PINNED], True)], "the rest is lazy"
        assert [adapter["name"] for adapter in client.get(ADAPTERS).json()["data"]] == sorted(NAMES)
        assert answers(client) == before
        assert server.upload("acme", "sixth", adapter_folders["a2"])["version"] == 1
        server.wait_idle()
