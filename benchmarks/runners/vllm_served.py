"""vLLM's CPU build, its OpenAI server in processes of its own: streams over HTTP."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

from benchmarks.request_set import BenchRequest
from benchmarks.runners.runner import Job, Outcome, run_as_main
from benchmarks.runners.server_process import ServerProcess, free_port
from benchmarks.runners.stream_client import run_streams

MODEL_NAME = "base"


class VllmServed:
    def __init__(self, job: Job) -> None:
        port = free_port()
        settings = {
            "--served-model-name": MODEL_NAME,
            "--port": port,
            "--dtype": "bfloat16",
            "--max-model-len": 1024,
            "--max-num-seqs": 64,
            "--max-num-batched-tokens": 2048,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(job.model)]
        command += [str(part) for setting in settings.items() for part in setting]
        self._server = ServerProcess([*command, "--no-enable-prefix-caching"], port=port, health="/health")

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        return run_streams(
            self._server.port,
            requests,
            num_streams=num_streams or len(requests),
            extra=lambda _: {"model": MODEL_NAME},
        )

    def facts(self) -> dict[str, Any]:
        return {
            "version": version("vllm"),
            "backend": "CPU, OpenAI server, compiled",
            "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
            "start_s": self._server.ready_s,
        }

    def close(self) -> None:
        self._server.close()


if __name__ == "__main__":
    run_as_main(VllmServed)
