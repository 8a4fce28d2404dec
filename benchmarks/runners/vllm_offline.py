"""vLLM's CPU build, offline, by its own Python: all requests in one batch. LoRA makes it run eagerly by itself."""

from __future__ import annotations

import os
from typing import Any

from benchmarks.request_set import BenchRequest, adapter_name
from benchmarks.runners.runner import Job, Outcome, run_as_main


class VllmOffline:
    def __init__(self, job: Job) -> None:
        from vllm import LLM

        self._job = job
        lora = {"enable_lora": True, "max_loras": job.num_adapters, "max_lora_rank": 64} if job.num_adapters else {}
        self._llm = LLM(
            str(job.model),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            enable_prefix_caching=False,
            **lora,
        )

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        from vllm import SamplingParams

        assert num_streams is None, "offline"
        outputs = self._llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [SamplingParams(max_tokens=each.output_tokens, ignore_eos=True, temperature=0.0) for each in requests],
            use_tqdm=False,
            lora_request=self._lora(requests),
        )
        return Outcome(num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs))

    def facts(self) -> dict[str, Any]:
        import vllm

        return {
            "version": vllm.__version__,
            "backend": "CPU, offline, eager" if self._job.num_adapters else "CPU, offline, compiled",
            "threads": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", ""),
        }

    def close(self) -> None: ...

    def _lora(self, requests: list[BenchRequest]) -> list[Any] | None:
        from vllm.lora.request import LoRARequest

        if not self._job.num_adapters:
            return None
        indices = [request.adapter(self._job.num_adapters) for request in requests]
        return [LoRARequest(adapter_name(i), i + 1, str(self._job.adapters / adapter_name(i))) for i in indices]


if __name__ == "__main__":  # vLLM's worker processes import this module again
    run_as_main(VllmOffline)
