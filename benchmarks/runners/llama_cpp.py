"""llama.cpp's server in a process of its own: as many slots as requests are open at once, streams over HTTP.

It takes adapters only at its start, so all of them are given there and each request names its own.
"""

from __future__ import annotations

import re
import subprocess
from typing import Any

from benchmarks.peers import llama_cpp, llama_server
from benchmarks.request_set import BenchRequest, adapter_name
from benchmarks.runners.runner import Job, Outcome, run_as_main
from benchmarks.runners.server_process import ServerProcess, free_port
from benchmarks.runners.stream_client import run_streams
from loraplex.engine.threads import default_num_threads

TOKENS_PER_SLOT = 640  # the longest prompt and its answer


class LlamaCpp:
    def __init__(self, job: Job) -> None:
        assert job.peer is not None
        self._num_adapters = job.num_adapters
        self._num_slots = job.num_streams
        self._program = llama_server(llama_cpp(job.peer.parent))
        port, threads = free_port(), default_num_threads()
        settings = {
            "--model": job.gguf / "model-bf16.gguf",
            "--port": port,
            "--threads": threads,
            "--threads-batch": threads,
            "--parallel": self._num_slots,
            "--ctx-size": self._num_slots * TOKENS_PER_SLOT,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--flash-attn": "on",
            "--cache-ram": 0,  # copies of finished prompts, which no request of ours repeats
        }
        command = [str(self._program), *(str(part) for setting in settings.items() for part in setting)]
        command += ["--no-kv-unified", "--no-warmup", "--no-webui"]
        if job.num_adapters:
            files = [str(job.gguf / f"{adapter_name(index)}.gguf") for index in range(job.num_adapters)]
            command += ["--lora", ",".join(files), "--lora-init-without-apply"]
        self._server = ServerProcess(command, port=port, health="/health")

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        streams = num_streams or len(requests)
        return run_streams(self._server.port, requests, num_streams=streams, extra=self._extra)

    def facts(self) -> dict[str, Any]:
        shown = subprocess.run([self._program, "--version"], capture_output=True, text=True, check=False)
        found = re.search(r"version: (.+)", shown.stderr + shown.stdout)
        return {
            "version": f"{found[1] if found else 'unknown'}, of llama-cpp-python",
            "backend": f"HTTP server, {self._num_slots} slots, bf16 GGUF",
            "threads": default_num_threads(),
            "start_s": self._server.ready_s,
        }

    def close(self) -> None:
        self._server.close()

    def _extra(self, request: BenchRequest) -> dict[str, Any]:
        extra: dict[str, Any] = {"cache_prompt": False}
        if self._num_adapters:
            extra["lora"] = [{"id": request.adapter(self._num_adapters), "scale": 1.0}]
        return extra


if __name__ == "__main__":
    run_as_main(LlamaCpp)
