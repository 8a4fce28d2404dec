"""Sees every logit that an offline engine computes, by request, without changing what it computes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.engine.frontend.llm import LLM
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.scheduler_output import RunnerOutput, RunnerTotals, SchedulerOutput
from loraplex.kernels.attention.metadata import KVCache


class LogitsRecorder:
    """While entered, stands between engine core and runner, and between runner and model."""

    def __init__(self, llm: LLM) -> None:
        self._core: Any = llm._core  # the seams are private on purpose; only this check looks through them
        self._runner: Any = self._core._runner
        self._rows: dict[str, list[Tensor]] = defaultdict(list)
        self._hidden = torch.empty(0)

    def __enter__(self) -> LogitsRecorder:
        self._model: DecoderModel = self._runner._model
        self._core._runner = self
        self._runner._model = self  # stands in for the model, call by call
        return self

    def __exit__(self, *_: object) -> None:
        self._core._runner = self._runner
        self._runner._model = self._model

    def logits(self) -> list[Tensor]:
        """float32 [prompt positions, vocabulary] of every request, in the order in which they came."""
        in_order = sorted(self._rows, key=lambda request_id: [int(part) for part in request_id.split(".")])
        return [torch.cat(self._rows[request_id]) for request_id in in_order]

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        results: RunnerOutput = self._runner.execute(output)
        logits = self._model.compute_logits(self._hidden).float()
        for entry, rows in zip(
            output.scheduled, torch.split(logits, [e.num_tokens for e in output.scheduled]), strict=True
        ):
            self._rows[entry.request.request_id].append(rows)
        return results

    def totals(self) -> RunnerTotals:
        totals: RunnerTotals = self._runner.totals()
        return totals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)  # whatever else the runner asks its model for

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], meta: ForwardMeta) -> Tensor:
        self._hidden = self._model.forward(input_ids, positions, kv_caches, meta)
        return self._hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)
