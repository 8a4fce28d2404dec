"""A real `loraplex serve` process, and its API in a few words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

ADMIN_KEY = "lpx_admin-of-the-end-to-end-tests-0123456789"
SERVED_NAME = "base"
START_TIMEOUT_S = 120.0
COMMAND = [str(Path(sys.executable).with_name("loraplex")), "serve"]


class Server:
    """One server process in its own data folder. `api` calls it with the admin's key."""

    def __init__(self, model: Path, data_dir: Path, *flags: str, env: dict[str, str] | None = None) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.data_dir = data_dir
        self._log = data_dir / "server.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*COMMAND, *_flags(model, data_dir), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LORAPLEX_ADMIN_KEY": ADMIN_KEY, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        self.url = ""
        self.api = httpx.Client(headers=bearer(ADMIN_KEY), timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "loraplex.engine.frontend.engine_process" in child.cmdline())

    def wait_announced(self) -> None:
        """Until the summary with the URL is printed, which happens once, when the engine is ready."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while "/v1\n" not in self.log:
            assert self.process.poll() is None, f"the server ended ({self.process.returncode}):\n{self.log}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log}"
            time.sleep(0.05)
        line = next(line for line in self.log.splitlines() if line.startswith("URL"))
        self.url = line.split()[1].removesuffix("/v1")
        self.api.base_url = httpx.URL(self.url)

    def wait_ready(self) -> None:
        wait_until(lambda: self.api.get("/readyz").status_code == 200, "ready")

    def integrity(self) -> dict[str, Any]:
        report: dict[str, Any] = self.api.get("/api/v1/engine/integrity").raise_for_status().json()
        return report

    def wait_idle(self) -> None:
        """Until nothing is held any more, and nothing is wrong."""
        wait_until(lambda: is_clean(self.integrity()), f"clean: {self.integrity()}")

    def create_tenant(self, name: str) -> httpx.Client:
        """A client with a key of the new tenant that may do everything in it."""
        self.api.post("/api/v1/tenants", json={"name": name}).raise_for_status()
        return self.create_client(name, "infer", "adapters:read", "adapters:write")

    def create_client(self, tenant: str, *scopes: str) -> httpx.Client:
        body = {"name": "test", "scopes": list(scopes)}
        key = self.api.post(f"/api/v1/tenants/{tenant}/keys", json=body).raise_for_status().json()
        return httpx.Client(base_url=self.url, headers=bearer(key["secret"]), timeout=60)

    def upload(self, tenant: str, name: str, folder: Path) -> dict[str, Any]:
        files = [("files", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
        reply = self.api.post(f"/api/v1/tenants/{tenant}/adapters/{name}/versions", files=files)
        assert reply.status_code == 201, reply.text
        version: dict[str, Any] = reply.json()
        return version

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def close(self) -> None:
        self.api.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@contextmanager
def running_server(model: Path, data_dir: Path, *flags: str, **given: Any) -> Iterator[Server]:
    server = Server(model, data_dir, *flags, **given)
    try:
        server.wait_announced()
        yield server
    finally:
        server.close()


def _flags(model: Path, data_dir: Path) -> tuple[str, ...]:
    where = ("--model", str(model), "--data-dir", str(data_dir), "--port", "0")
    return (*where, "--served-model-name", SERVED_NAME, "--dtype", "float32")


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def is_clean(report: dict[str, Any]) -> bool:
    return not report["faults"] and not any(value for name, value in report.items() if name != "faults")


def wait_until(condition: Any, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never became {what}"
        time.sleep(0.05)


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The events of a stream; ends at [DONE]."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            yield json.loads(line.removeprefix("data: "))
