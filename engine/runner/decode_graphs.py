"""Decode steps as recorded graphs: one launch instead of hundreds, for batches padded to a few fixed shapes.

A shape is a number of sequences (a power of two, or the most that may run), a bound on their lengths (which sets how
many partitions of the keys attention launches; those beyond a sequence's end leave at once) and the slots of its widest
selection. It is recorded when it is first met, or before serving by `record_common`. Everything else about a batch is
data in the static inputs, so a graph serves any mixture of adapters, base rows and lengths that its shape holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.runner.graph_inputs import GraphInputs, GraphShape, StaticMemory, inputs_bytes
from loraplex.engine.runner.input_batch import InputBatch
from loraplex.engine.scheduler_output import ScheduledRequest
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.lora.metadata import LoRAPools

logger = logging.getLogger(__name__)

_SHORTEST_BOUND = 1024  # tokens; each bound is four times the one before
_NARROWEST_TABLE = 4  # slots; each width is twice the one before


class Recorder(Protocol):
    """Turns a computation on fixed addresses into something that repeats it."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Run `compute` and return its replay. It may run more than once meanwhile."""
        ...


class EagerRecorder:
    """Records nothing: a replay computes op by op again. For a device without graphs, and to measure one replay."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        return compute


class DecodeOutput(NamedTuple):
    """Views of static buffers, overwritten by the next replay."""

    logits: Tensor  # [num_seqs, vocab_size], in the model's dtype
    largest: Tensor  # int64 [num_seqs]: the likeliest tokens
    is_finite: Tensor  # bool [num_seqs]: hidden states and logits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    inputs: GraphInputs
    replay: Callable[[], None]


class DecodeGraphs:
    """The graphs of one runner. Its memory is allocated here, once."""

    def __init__(
        self,
        model: DecoderModel,
        kv_caches: Sequence[KVCache],
        pools: LoRAPools | None,
        recorder: Recorder,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        self._model = model
        self._kv_caches = kv_caches
        self._pools = pools
        self._recorder = recorder
        self._block_size = block_size
        self.batch_sizes = _ladder(1, max_num_seqs, factor=2)
        self._bounds = _ladder(_SHORTEST_BOUND, max_model_len, factor=4)
        self._widths = () if pools is None else _ladder(_NARROWEST_TABLE, pools.scaling.shape[2], factor=2)
        self._memory = StaticMemory.allocate(inputs_bytes(self.largest, block_size), model.device)
        self._logits = torch.zeros(max_num_seqs, model.config.vocab_size, dtype=model.dtype, device=model.device)
        self._largest = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
        self._is_finite = torch.zeros(max_num_seqs, dtype=torch.bool, device=model.device)
        self._recorded: dict[GraphShape, _Recorded] = {}

    @property
    def largest(self) -> GraphShape:
        return GraphShape(self.batch_sizes[-1], self._bounds[-1], max(self._widths, default=0))

    @property
    def num_recorded(self) -> int:
        return len(self._recorded)

    def takes(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether a step of these can be replayed: one token each, and no logprobs of a prompt."""
        return len(scheduled) <= self.batch_sizes[-1] and all(
            entry.num_tokens == 1 and not (entry.request.wants_prompt_logprobs and not entry.request.num_output_tokens)
            for entry in scheduled
        )

    def shape_of(self, batch: InputBatch) -> GraphShape:
        """The smallest shape that holds the batch."""
        lora = batch.lora
        width = 0 if lora is None else max(table.slot_table.shape[1] for table in (lora.attention, lora.mlp))
        return GraphShape(
            _first_that_holds(self.batch_sizes, batch.attention.num_seqs),
            _first_that_holds(self._bounds, batch.attention.max_seq_len),
            _first_that_holds(self._widths, width) if width else 0,
        )

    @torch.inference_mode()
    def run(self, batch: InputBatch) -> DecodeOutput:
        """Compute a step of which `takes` is true; `batch` lies on the host."""
        shape = self.shape_of(batch)
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._record(shape, batch)
        else:
            recorded.inputs.fill(batch)
        recorded.replay()
        num_seqs = batch.attention.num_seqs
        return DecodeOutput(self._logits[:num_seqs], self._largest[:num_seqs], self._is_finite[:num_seqs])

    @torch.inference_mode()
    def record_common(self, *, budget_s: float) -> None:
        """Record the shapes of short sequences, with and without adapters, until the time is up; others follow later.

        Nothing that counts is written: padding stores no keys.
        """
        end = time.monotonic() + budget_s
        usual_widths = (0, *self._widths[1:2])  # rank 64 with slots of 8
        for num_seqs in reversed(self.batch_sizes):
            for width in usual_widths:
                if time.monotonic() > end:
                    logger.info("decode graphs: %d recorded, the rest at first use", self.num_recorded)
                    return
                self._record(GraphShape(num_seqs, self._bounds[0], width), None)
        logger.info("decode graphs: %d recorded", self.num_recorded)

    @torch.inference_mode()
    def compute_largest(self) -> None:
        """One padded step of the largest shape, not recorded: what it allocates is what any graph may hold."""
        self._compute_once(self._inputs(self.largest, None))

    def _record(self, shape: GraphShape, batch: InputBatch | None) -> _Recorded:
        inputs = self._inputs(shape, batch)
        recorded = _Recorded(inputs=inputs, replay=self._recorder.record(lambda: self._compute_once(inputs)))
        self._recorded[shape] = recorded
        return recorded

    def _inputs(self, shape: GraphShape, batch: InputBatch | None) -> GraphInputs:
        inputs = GraphInputs(shape, self._memory, block_size=self._block_size)
        inputs.fill(batch)
        return inputs

    def _compute_once(self, inputs: GraphInputs) -> None:
        """The whole step on the static buffers: what is recorded."""
        meta = ForwardMeta(attention=inputs.attention(), lora=inputs.lora(), pools=self._pools)
        hidden = self._model.forward(inputs.input_ids, inputs.positions, self._kv_caches, meta)
        logits = self._model.compute_logits(hidden)
        _, finite_hidden = self._model.backend.row_maximum(hidden)
        largest, finite_logits = self._model.backend.row_maximum(logits)
        num_seqs = inputs.shape.num_seqs
        self._logits[:num_seqs].copy_(logits)
        self._largest[:num_seqs].copy_(largest)
        self._is_finite[:num_seqs].copy_(finite_hidden & finite_logits)


def _ladder(first: int, last: int, *, factor: int) -> tuple[int, ...]:
    """first, first * factor, ... below `last`, and `last`."""
    steps = []
    while first < last:
        steps.append(first)
        first *= factor
    return (*steps, last)


def _first_that_holds(sizes: Sequence[int], size: int) -> int:
    assert size <= sizes[-1], f"no graph is as large as {size}; the largest is {sizes[-1]}"
    return next(each for each in sizes if size <= each)
