"""transformers + PEFT, in a process of its own: one static, left-padded batch; adapters mixed by `adapter_names`."""

from __future__ import annotations

from typing import Any

import peft
import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.request_set import BenchRequest, adapter_name
from benchmarks.runners.runner import Job, Outcome, run_as_main

PAD = 2


class TransformersPeft:
    def __init__(self, job: Job) -> None:
        self._num_adapters = job.num_adapters
        model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16)
        for index in range(job.num_adapters):
            folder, name = str(job.adapters / adapter_name(index)), adapter_name(index)
            if index == 0:
                model = peft.PeftModel.from_pretrained(model, folder, adapter_name=name, autocast_adapter_dtype=False)
            else:
                model.load_adapter(folder, adapter_name=name, autocast_adapter_dtype=False)
        self._model = model.eval()

    @torch.inference_mode()
    def run(self, requests: list[BenchRequest], num_streams: int | None) -> Outcome:
        assert num_streams is None, "offline"
        prompts = [request.prompt_token_ids for request in requests]
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        names = [adapter_name(request.adapter(self._num_adapters)) for request in requests if self._num_adapters]
        output = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=requests[0].output_tokens,
            min_new_tokens=requests[0].output_tokens,
            do_sample=False,
            pad_token_id=PAD,
            **({"adapter_names": names} if names else {}),
        )
        return Outcome(num_tokens=int((output.shape[1] - width) * output.shape[0]))

    def facts(self) -> dict[str, Any]:
        versions = f"{transformers.__version__} + {peft.__version__}"
        return {"version": versions, "backend": f"torch {torch.__version__}", "threads": torch.get_num_threads()}

    def close(self) -> None: ...


if __name__ == "__main__":
    run_as_main(TransformersPeft)
