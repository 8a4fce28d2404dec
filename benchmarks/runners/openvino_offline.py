"""OpenVINO GenAI, offline, by its own Python: all requests in one continuous batch, from the f16 GGUF."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.request_set import BenchRequest
from benchmarks.runners.runner import Job, Outcome, run_as_main

KV_CACHE_GIB = 4


class OpenVinoOffline:
    def __init__(self, job: Job) -> None:
        assert not job.num_adapters, "adapters are ignored beside a GGUF model"
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = KV_CACHE_GIB
        scheduler.max_num_seqs = 64
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        model = str(job.gguf / "model-f16.gguf")
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        assert num_streams is None, "offline"
        prompts = [openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64)) for request in requests]
        results = self._pipeline.generate(prompts, [_config(request) for request in requests])
        return Outcome(num_tokens=sum(len(result.m_generation_ids[0]) for result in results))

    def facts(self) -> dict[str, Any]:
        return {
            "version": openvino_genai.__version__,
            "backend": "CPU, continuous batching, f16 GGUF",
            "threads": "its own choice",
        }

    def close(self) -> None: ...


def _config(request: BenchRequest) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.output_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    run_as_main(OpenVinoOffline)
