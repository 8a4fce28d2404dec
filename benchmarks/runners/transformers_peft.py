"""transformers + PEFT, in a process of its own: one static, left-padded batch; adapters mixed by `adapter_names`."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.request_set import OUTPUT_TOKENS, BenchRequest, adapter_name
from benchmarks.runners.runner import Job, run_as_main

PAD = 2


class TransformersPeft:
    name = "transformers+peft"

    def __init__(self, job: Job) -> None:
        self._job = job
        model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
        for index in range(job.num_adapters):
            folder, name = str(job.adapters / adapter_name(index)), adapter_name(index)
            if index == 0:
                model = peft.PeftModel.from_pretrained(
                    model, folder, adapter_name=name, autocast_adapter_dtype=False
                ).eval()
            else:
                model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
        self._model = model.eval()

    @torch.inference_mode()
    def run(self, requests: list[BenchRequest]) -> int:
        width = max(len(request.prompt_token_ids) for request in requests)
        prompts = [request.prompt_token_ids for request in requests]
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        names = [request.adapter(self._job.num_adapters) for request in requests] if self._job.num_adapters else None
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=OUTPUT_TOKENS,
            min_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            pad_token_id=PAD,
            **({"adapter_names": names} if names else {}),
        )
        return int((output.shape[1] - width) * output.shape[0])

    def facts(self) -> dict[str, Any]:
        versions = f"{transformers.__version__} + {peft.__version__}"
        return {"version": versions, "threads": torch.get_num_threads()}


if __name__ == "__main__":
    run_as_main(TransformersPeft)
