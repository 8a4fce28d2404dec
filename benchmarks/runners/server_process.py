"""A server as a child process, from its start until it answers to its end. Standard library only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05


class ServerProcess:
    """Listens on 127.0.0.1 at `port` as soon as the constructor returns; `ready_s` is what that took.

    Raises:
        RuntimeError: it ended, or was not ready in time; with the end of what it wrote.
    """

    def __init__(
        self, command: Sequence[str], *, port: int, health: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = port
        self._log = tempfile.NamedTemporaryFile(prefix="bench-server-", suffix=".log")  # noqa: SIM115  # until close
        started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            process_group=0,  # so that its own children end with it
        )
        try:
            self._wait_ready(f"http://127.0.0.1:{port}{health}", started + START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - started

    @property
    def pid(self) -> int:
        return self._process.pid

    def output(self) -> str:
        """What it wrote so far."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()

    def _wait_ready(self, url: str, deadline: float) -> None:
        while not _answers(url):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended ({self._process.returncode}):\n{self.output()[-3000:]}")
            if time.perf_counter() > deadline:
                raise RuntimeError(f"the server was not ready in {START_TIMEOUT_S:.0f} s:\n{self.output()[-3000:]}")
            time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False
