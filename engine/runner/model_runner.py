"""Turns a step's batch into tokens: zero -> lay out -> forward -> logits -> sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.engine.runner.input_batch import InputBatch, build_input_batch
from loraplex.engine.runner.logprobs import compute_logprobs
from loraplex.engine.runner.sampler import Sampler
from loraplex.engine.scheduler_output import RequestResult, RunnerOutput, ScheduledRequest, SchedulerOutput
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.lora.metadata import LoRAPools

# Rows of prompt logprobs that pass the head at once: bounds [rows, vocabulary] scratch for prompts of any length.
MAX_PROMPT_LOGITS_ROWS = 256


class ModelRunner:
    """Runs a model on the batches that the scheduler puts together.

    It keeps no state of requests beyond the sampler's token counts: everything is read from `Request`, and
    nothing of it is written.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: Sequence[KVCache],
        pools: LoRAPools | None,
        *,
        block_size: int,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._pools = pools
        self._block_size = block_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute one step; results come in the order of `output.scheduled`.

        A sequence whose hidden states or logits hold NaN or Inf is reported with `is_finite=False`, without a token
        or logprobs; its rows are kept out of sampling, and no other result depends on them.
        """
        self._zero_blocks(output.blocks_to_zero)
        if not output.scheduled:
            return RunnerOutput()
        batch = build_input_batch(
            output.scheduled,
            block_size=self._block_size,
            lora_chunk_size=self._model.backend.lora_chunk_size,
            device=self._model.device,
        )
        meta = ForwardMeta(attention=batch.attention, lora=batch.lora, pools=self._pools)
        hidden = self._model.forward(batch.input_ids, batch.positions, self._kv_caches, meta)
        results = _StepResults(output.scheduled, self._finite_sequences(hidden, batch))
        self._describe_prompts(hidden, batch, results)
        self._sample(hidden, batch, results)
        return results.finish()

    def _zero_blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            blocks = torch.tensor(block_ids, device=self._model.device)
            for cache in self._kv_caches:
                cache.key.index_fill_(0, blocks, 0)
                cache.value.index_fill_(0, blocks, 0)

    def _describe_prompts(self, hidden: Tensor, batch: InputBatch, results: _StepResults) -> None:
        prompt = batch.prompt
        for start in range(0, len(prompt.rows), MAX_PROMPT_LOGITS_ROWS):
            piece = slice(start, start + MAX_PROMPT_LOGITS_ROWS)
            sequences = prompt.sequences[piece]
            logits, kept, _ = self._finite_logits(hidden, prompt.rows[piece], sequences, results)
            entries = compute_logprobs(
                logits,
                prompt.token_ids[piece][kept].tolist(),
                [results.request(sequence).sampling_params.prompt_logprobs or 0 for sequence in sequences[kept]],
            )
            for sequence, entry in zip(sequences[kept], entries, strict=True):
                results.prompt_logprobs[sequence].append(entry)

    def _sample(self, hidden: Tensor, batch: InputBatch, results: _StepResults) -> None:
        if not len(batch.sampled):
            return
        logits, kept, largest = self._finite_logits(hidden, batch.sampled_rows, batch.sampled, results)
        sequences = batch.sampled[kept].tolist()
        requests = [results.request(sequence) for sequence in sequences]
        described = [row for row, request in enumerate(requests) if request.sampling_params.logprobs is not None]
        unmodified = logits[described]  # a copy: sampling edits the logits
        token_ids = self._sampler.sample(logits, requests, largest) if requests else []
        results.token_ids.update(zip(sequences, token_ids, strict=True))
        entries = compute_logprobs(
            unmodified,
            [token_ids[row] for row in described],
            [requests[row].sampling_params.logprobs or 0 for row in described],
        )
        results.logprobs.update(zip([sequences[row] for row in described], entries, strict=True))

    def _finite_logits(
        self, hidden: Tensor, rows: NDArray[np.int64], sequences: NDArray[np.int64], results: _StepResults
    ) -> tuple[Tensor, NDArray[np.int64], Tensor]:
        """Logits of those `rows` whose sequences are finite so far, their places in `rows`, and the largest of each."""
        logits = self._model.compute_logits(hidden[torch.from_numpy(rows).to(hidden.device)])
        largest, is_finite = self._model.backend.row_maximum(logits)
        results.is_finite[sequences[~is_finite.numpy(force=True)]] = False
        kept = np.flatnonzero(results.is_finite[sequences])
        if len(kept) < len(rows):
            places = torch.from_numpy(kept).to(logits.device)
            logits, largest = logits[places], largest[places]
        return logits, kept, largest

    def _finite_sequences(self, hidden: Tensor, batch: InputBatch) -> NDArray[np.bool_]:
        """All rows count, not only those that get logits: a poisoned prefill must not become a cached prefix."""
        _, is_finite = self._model.backend.row_maximum(hidden)
        return np.logical_and.reduceat(is_finite.numpy(force=True), batch.query_start[:-1])


class _StepResults:
    """What is known of each scheduled sequence, by its index, until all of it is."""

    def __init__(self, scheduled: Sequence[ScheduledRequest], is_finite: NDArray[np.bool_]) -> None:
        self._scheduled = scheduled
        self.is_finite = is_finite
        self.token_ids: dict[int, int] = {}
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in scheduled]

    def request(self, sequence: int) -> Request:
        return self._scheduled[sequence].request

    def finish(self) -> RunnerOutput:
        return RunnerOutput(results=tuple(self._result(sequence) for sequence in range(len(self._scheduled))))

    def _result(self, sequence: int) -> RequestResult:
        request_id = self.request(sequence).request_id
        if not self.is_finite[sequence]:
            return RequestResult(request_id=request_id, is_finite=False)
        return RequestResult(
            request_id=request_id,
            token_id=self.token_ids.get(sequence),
            logprobs=self.logprobs.get(sequence),
            prompt_logprobs=tuple(self.prompt_logprobs[sequence]),
        )
