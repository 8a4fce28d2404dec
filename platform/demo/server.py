"""The demo's own `loraplex serve`, in a process of its own, and a small client for it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loraplex.adapters.errors import ServerError

MODEL_NAME = "smollm2"
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoServer:
    """A running server with its platform-admin key."""

    url: str
    admin_key: str
    process: subprocess.Popen[bytes]
    log: Path

    def call(self, method: str, path: str, *, key: str | None = None, **options: Any) -> Any:
        """One JSON call; an error status raises ServerError with the server's own words."""
        headers = {"Authorization": f"Bearer {key or self.admin_key}"}
        response = httpx.request(method, self.url + path, headers=headers, timeout=120, **options)
        if response.is_error:
            raise ServerError(f"{method} {path}: {response.status_code} {response.text}")
        return response.json() if response.content else None

    def upload(self, tenant: str, adapter: str, folder: Path) -> Any:
        files = [("files", (file.name, file.read_bytes())) for file in sorted(folder.iterdir()) if file.is_file()]
        return self.call("POST", f"/api/v1/tenants/{tenant}/adapters/{adapter}/versions", files=files)


@contextmanager
def running_server(model_dir: Path, demo_dir: Path, *, host: str, port: int) -> Iterator[DemoServer]:
    """Start a server with empty data on `port`, or the next free one; it ends with the block."""
    port = next_free_port(host, port)
    data_dir = demo_dir / f"server-{port}"
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.mkdir(parents=True)
    admin_key = "lpx_" + secrets.token_urlsafe(32)
    log = data_dir / "server.log"
    command = [str(Path(sys.executable).with_name("loraplex")), "serve"]
    flags = {
        "--model": str(model_dir),
        "--served-model-name": MODEL_NAME,
        "--dtype": "float32",  # in so small a model the best two tokens often lie closer than bfloat16 rounds
        "--host": host,
        "--port": str(port),
        "--data-dir": str(data_dir / "data"),
        "--max-model-len": "2048",
        "--adapter-slots": "16",
    }
    environment = _without_settings(os.environ) | {"LORAPLEX_ADMIN_KEY": admin_key}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(part for flag in flags.items() for part in flag)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the server gently
        )
    server = DemoServer(url=f"http://{host}:{port}", admin_key=admin_key, process=process, log=log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def next_free_port(host: str, port: int) -> int:
    for candidate in range(port, port + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, candidate))
            except OSError:
                continue
            return candidate
    raise ServerError(f"no free port between {port} and {port + 99}; give another with --port")


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The demo serves the demo, whatever the shell is set up to serve."""
    return {name: value for name, value in environment.items() if not name.startswith("LORAPLEX_")}


def _wait_until_ready(server: DemoServer) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            if httpx.get(server.url + "/readyz", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    tail = server.log.read_text(errors="replace")[-2000:]
    raise ServerError(f"the server did not become ready; the end of {server.log}:\n{tail}")
