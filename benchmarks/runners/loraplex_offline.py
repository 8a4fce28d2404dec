"""Our engine, offline, in a process of its own: all requests in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from benchmarks.request_set import BenchRequest, adapter_name, adapter_rank
from benchmarks.runners.runner import Job, Outcome, run_as_main
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams

SLOT_RANK = 8
FEWEST_SLOTS = 8  # an engine without adapters to serve keeps a few all the same


class LoraplexOffline:
    def __init__(self, job: Job) -> None:
        self._num_adapters = job.num_adapters
        adapters = {adapter_name(i): job.adapters / adapter_name(i) for i in range(job.num_adapters)}
        self._llm = LLM(
            job.model,
            adapters=adapters,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            lora_dtype="bfloat16",  # as the adapters come, so nothing is rounded
            max_model_len=1024,
            adapter_slots=max(FEWEST_SLOTS, sum(-(-adapter_rank(i) // SLOT_RANK) for i in range(job.num_adapters))),
            slot_rank=SLOT_RANK,
            enable_prefix_caching=False,
            max_num_seqs=64,
        )

    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        assert num_streams is None, "offline"
        outputs = self._llm.generate(
            [request.prompt_token_ids for request in requests],
            [SamplingParams(max_tokens=each.output_tokens, temperature=0.0, ignore_eos=True) for each in requests],
            self._lora(requests),
        )
        return Outcome(num_tokens=sum(len(output.outputs[0].token_ids) for output in outputs))

    def facts(self) -> dict[str, Any]:
        info = self._llm.info
        return {"version": version("loraplex"), "backend": info.backend, "threads": info.num_threads}

    def close(self) -> None: ...

    def _lora(self, requests: list[BenchRequest]) -> Sequence[str] | None:
        if not self._num_adapters:
            return None
        return [adapter_name(request.adapter(self._num_adapters)) for request in requests]


if __name__ == "__main__":
    run_as_main(LoraplexOffline)
