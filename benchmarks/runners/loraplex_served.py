"""Our server, `loraplex serve`, in processes of its own: streams over HTTP, with a tenant's key."""

from __future__ import annotations

import json
import sys
import tempfile
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.request_set import BenchRequest
from benchmarks.runners.runner import Job, Outcome, run_as_main
from benchmarks.runners.server_process import ServerProcess, free_port
from benchmarks.runners.stream_client import run_streams

ADMIN_KEY = "lpx_admin-of-the-benchmark-0123456789abcdef"
TENANT = "bench"
MODEL_NAME = "base"


class LoraplexServed:
    def __init__(self, job: Job) -> None:
        self._data = tempfile.TemporaryDirectory(prefix="bench-loraplex-")
        port = free_port()
        settings = {
            "--model": job.model,
            "--served-model-name": MODEL_NAME,
            "--data-dir": self._data.name,
            "--port": port,
            "--dtype": "bfloat16",
            "--max-model-len": 1024,
            "--max-num-seqs": 64,
            "--kv-cache-memory-gib": 4,
        }
        command = [str(Path(sys.executable).with_name("loraplex")), "serve"]
        self._server = ServerProcess(
            [*command, *(str(part) for setting in settings.items() for part in setting)],
            port=port,
            health="/readyz",
            environment={"LORAPLEX_ADMIN_KEY": ADMIN_KEY},
        )
        self._post("/api/v1/tenants", {"name": TENANT})
        reply = self._post(f"/api/v1/tenants/{TENANT}/keys", {"name": "bench", "scopes": ["infer"]})
        self._key: str = reply["secret"]

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        return run_streams(
            self._server.port,
            requests,
            num_streams=num_streams or len(requests),
            extra=lambda _: {"model": MODEL_NAME},
            key=self._key,
        )

    def facts(self) -> dict[str, Any]:
        summary = dict(line.split(maxsplit=1) for line in self._server.output().splitlines() if " " in line)
        return {
            "version": version("loraplex"),
            "backend": summary.get("engine", "").strip(),
            "start_s": self._server.ready_s,
        }

    def close(self) -> None:
        self._server.close()
        self._data.cleanup()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._server.port}{path}",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


if __name__ == "__main__":
    run_as_main(LoraplexServed)
