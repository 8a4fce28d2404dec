"""Our engine, offline, in a process of its own: all requests in one batch."""

from __future__ import annotations

from typing import Any

from benchmarks.request_set import OUTPUT_TOKENS, BenchRequest, adapter_name
from benchmarks.runners.runner import Job, run_as_main
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


class LoraplexOffline:
    def __init__(self, job: Job) -> None:
        self._job = job
        self.name = "loraplex" if job.backend == "auto" else f"loraplex {job.backend}"
        adapters = {adapter_name(i): job.adapters / adapter_name(i) for i in range(job.num_adapters)}
        self._llm = LLM(
            job.model,
            adapters=adapters,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            backend=job.backend,
            max_model_len=1024,
            adapter_slots=max(8, 64 * job.num_adapters // 8),
            enable_prefix_caching=False,
            max_num_seqs=64,
        )

    def run(self, requests: list[BenchRequest]) -> int:
        lora = [request.adapter(self._job.num_adapters) for request in requests] if self._job.num_adapters else None
        outputs = self._llm.generate([request.prompt_token_ids for request in requests], PARAMS, lora)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def facts(self) -> dict[str, Any]:
        return {"backend": self._llm.info.backend, "threads": self._llm.info.num_threads}


if __name__ == "__main__":
    run_as_main(LoraplexOffline)
