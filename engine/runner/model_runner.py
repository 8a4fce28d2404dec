"""Turns a step's batch into tokens: zero -> lay out -> forward -> logits -> sample, op by op or as a recorded graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request
from loraplex.engine.runner.decode_graphs import DecodeGraphs
from loraplex.engine.runner.finite_segments import finite_segments
from loraplex.engine.runner.input_batch import InputBatch, build_input_batch
from loraplex.engine.runner.logprobs import compute_logprobs
from loraplex.engine.runner.sampler import PendingTokens, Sampler
from loraplex.engine.runner.to_device import to_device
from loraplex.engine.scheduler_output import (
    RequestResult,
    RunnerOutput,
    RunnerTotals,
    ScheduledRequest,
    SchedulerOutput,
)
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
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs`: decode steps of this model, caches and pools; without them every step runs op by op."""
        self._model = model
        self._kv_caches = kv_caches
        self._pools = pools
        self._block_size = block_size
        self._graphs = graphs
        self._sampler = Sampler()
        self.num_replayed_steps = 0
        self.num_eager_steps = 0

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        """Compute one step; results come in the order of `output.scheduled`.

        A sequence whose hidden states or logits hold NaN or Inf is reported with `is_finite=False`, without a token
        or logprobs, and no other result depends on it. From the forward pass to the tokens nothing waits for the
        device: tokens, and what is finite, come back in one copy.
        """
        self._zero_blocks(output.blocks_to_zero)
        if not output.scheduled:
            return RunnerOutput()
        results = _StepResults(output.scheduled)
        if self._graphs is not None and self._graphs.takes(output.scheduled):
            self._replay(self._graphs, results)
        else:
            self._run_eagerly(results)
        return results.finish()

    def totals(self) -> RunnerTotals:
        return RunnerTotals(replayed_steps=self.num_replayed_steps, fallbacks=self._model.backend.fallbacks)

    def _zero_blocks(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            blocks = to_device(np.array(block_ids), self._model.device)
            for cache in self._kv_caches:
                cache.key.index_fill_(0, blocks, 0)
                cache.value.index_fill_(0, blocks, 0)

    def _replay(self, graphs: DecodeGraphs, results: _StepResults) -> None:
        self.num_replayed_steps += 1
        batch = self._lay_out(results.scheduled, torch.device("cpu"))
        logits, largest, is_finite = graphs.run(batch)
        if not len(batch.sampled):  # pieces of prompts, one token each
            results.is_finite &= is_finite.numpy(force=True)
            return
        if len(batch.sampled) < len(logits):
            rows = to_device(batch.sampled, logits.device)
            logits, largest = logits[rows], largest[rows]
        self._sample(logits, largest, is_finite, batch.sampled, results)

    def _run_eagerly(self, results: _StepResults) -> None:
        self.num_eager_steps += 1
        batch = self._lay_out(results.scheduled, self._model.device)
        meta = ForwardMeta(attention=batch.attention, lora=batch.lora, pools=self._pools)
        hidden = self._model.forward(batch.input_ids, batch.positions, self._kv_caches, meta)
        # All rows count, not only those that get logits: a poisoned prefill must not become a cached prefix.
        _, is_finite = self._model.backend.row_maximum(hidden)
        if batch.attention.max_query_len > 1:
            is_finite = finite_segments(is_finite, batch.attention.query_start_loc)
        if len(batch.sampled):
            logits = self._logits(hidden, batch.sampled_rows)
            largest, finite_logits = self._model.backend.row_maximum(logits)
            if len(batch.sampled) == len(is_finite):
                is_finite &= finite_logits
            else:
                is_finite[to_device(batch.sampled, hidden.device)] &= finite_logits
            self._sample(logits, largest, is_finite, batch.sampled, results)
        else:
            results.is_finite &= is_finite.numpy(force=True)
        self._describe_prompts(hidden, batch, results)

    def _lay_out(self, scheduled: Sequence[ScheduledRequest], device: torch.device) -> InputBatch:
        return build_input_batch(
            scheduled,
            block_size=self._block_size,
            lora_chunk_size=self._model.backend.lora_chunk_size,
            device=device,
        )

    def _logits(self, hidden: Tensor, rows: NDArray[np.int64]) -> Tensor:
        """`rows` rise, so that as many as there are in `hidden` are all of them."""
        chosen = hidden if len(rows) == len(hidden) else hidden[to_device(rows, hidden.device)]
        return self._model.compute_logits(chosen)

    def _sample(
        self, logits: Tensor, largest: Tensor, is_finite: Tensor, sampled: NDArray[np.int64], results: _StepResults
    ) -> None:
        """Choose tokens of the `sampled` sequences from their `logits`, which may be edited, and fetch the outcome.

        `largest` are the likeliest tokens of the sampled sequences; `is_finite` tells of all sequences of the step.
        """
        requests = [results.request(sequence) for sequence in sampled.tolist()]
        described = np.flatnonzero([request.sampling_params.logprobs is not None for request in requests])
        # A copy, since sampling edits the logits.
        unmodified = logits[to_device(described, logits.device)].float() if len(described) else logits[:0]
        pending = self._sampler.start(logits, requests, largest)
        fetched = _Fetched.of(is_finite, pending)
        results.is_finite &= fetched.is_finite
        is_kept = results.is_finite[sampled]
        token_ids = pending.finish(fetched.token_ids, fetched.is_decided | ~is_kept)
        results.token_ids.update(zip(sampled.tolist(), token_ids, strict=True))
        if not len(described):
            return
        kept = np.flatnonzero(is_kept[described])
        entries = compute_logprobs(
            unmodified if len(kept) == len(described) else unmodified[to_device(kept, logits.device)],
            [token_ids[row] for row in described[kept]],
            [requests[row].sampling_params.logprobs or 0 for row in described[kept]],
        )
        results.logprobs.update(zip(sampled[described[kept]].tolist(), entries, strict=True))

    def _describe_prompts(self, hidden: Tensor, batch: InputBatch, results: _StepResults) -> None:
        prompt = batch.prompt
        for start in range(0, len(prompt.rows), MAX_PROMPT_LOGITS_ROWS):
            piece = slice(start, start + MAX_PROMPT_LOGITS_ROWS)
            sequences = prompt.sequences[piece]
            logits = self._logits(hidden, prompt.rows[piece]).float()
            _, is_finite = self._model.backend.row_maximum(logits)
            results.is_finite[sequences[~is_finite.numpy(force=True)]] = False
            kept = np.flatnonzero(results.is_finite[sequences])
            entries = compute_logprobs(
                logits if len(kept) == len(sequences) else logits[to_device(kept, logits.device)],
                prompt.token_ids[piece][kept].tolist(),
                [results.request(sequence).sampling_params.prompt_logprobs or 0 for sequence in sequences[kept]],
            )
            for sequence, entry in zip(sequences[kept], entries, strict=True):
                results.prompt_logprobs[sequence].append(entry)


class _Fetched(NamedTuple):
    """All that the host has to know of a step, brought by one copy."""

    is_finite: NDArray[np.bool_]  # [num_seqs]
    is_decided: NDArray[np.bool_]  # [num_sampled]
    token_ids: NDArray[np.int64]  # [num_sampled]

    @classmethod
    def of(cls, is_finite: Tensor, pending: PendingTokens) -> _Fetched:
        packed = torch.cat((is_finite, pending.is_decided, pending.token_ids)).numpy(force=True)
        first, second = len(is_finite), len(is_finite) + len(pending.is_decided)
        return cls(packed[:first] != 0, packed[first:second] != 0, packed[second:])


class _StepResults:
    """What is known of each scheduled sequence, by its index, until all of it is."""

    def __init__(self, scheduled: Sequence[ScheduledRequest]) -> None:
        self.scheduled = scheduled
        self.is_finite = np.ones(len(scheduled), dtype=np.bool_)
        self.token_ids: dict[int, int] = {}
        self.logprobs: dict[int, TokenLogprobs] = {}
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in scheduled]

    def request(self, sequence: int) -> Request:
        return self.scheduled[sequence].request

    def finish(self) -> RunnerOutput:
        return RunnerOutput(results=tuple(self._result(sequence) for sequence in range(len(self.scheduled))))

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
