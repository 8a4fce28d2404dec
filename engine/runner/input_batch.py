"""Turns the batch of a step into flat tensors, without a Python loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.scheduler_output import ScheduledRequest
from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import AttentionMeta
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Rows of the flat batch that predict prompt tokens whose logprobs were asked for, grouped by sequence."""

    rows: NDArray[np.int64]  # [num_prompt_rows]: token indices
    token_ids: NDArray[np.int64]  # [num_prompt_rows]: the prompt tokens that they predict
    sequences: NDArray[np.int64]  # [num_prompt_rows]: index into SchedulerOutput.scheduled


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """One flat batch. Tensors lie on the model's device; what only the host needs stays numpy."""

    input_ids: Tensor  # int64 [num_tokens]
    positions: Tensor  # int64 [num_tokens]
    attention: AttentionMeta
    lora: LoRAMeta | None  # None: every token runs through the base
    query_start: NDArray[np.int64]  # [num_seqs + 1]
    sampled: NDArray[np.int64]  # [num_sampled]: the sequences that get a token, as indices into `scheduled`
    sampled_rows: NDArray[np.int64]  # [num_sampled]: their last token indices
    prompt: PromptRows


def build_input_batch(
    scheduled: Sequence[ScheduledRequest], *, block_size: int, lora_chunk_size: int, device: torch.device
) -> InputBatch:
    """Lay out at least one scheduled request, those with one token first, in the order given."""
    num_tokens = np.array([entry.num_tokens for entry in scheduled], dtype=np.int64)
    start = np.array([entry.request.num_computed_tokens for entry in scheduled], dtype=np.int64)
    query_start = np.concatenate(([0], np.cumsum(num_tokens)))
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], num_tokens)
    sampled = np.flatnonzero([entry.is_sampled for entry in scheduled])
    return InputBatch(
        input_ids=torch.from_numpy(_input_ids(scheduled)).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=build_attention_meta(
            query_lens=num_tokens.tolist(),
            context_lens=start.tolist(),
            block_ids=[entry.request.block_ids for entry in scheduled],
            block_size=block_size,
            device=device,
        ),
        lora=_lora_meta(scheduled, num_tokens, chunk_size=lora_chunk_size, device=device),
        query_start=query_start,
        sampled=sampled,
        sampled_rows=query_start[sampled + 1] - 1,
        prompt=_prompt_rows(scheduled, query_start),
    )


def _input_ids(scheduled: Sequence[ScheduledRequest]) -> NDArray[np.int64]:
    starts = (entry.request.num_computed_tokens for entry in scheduled)
    chunks = (
        entry.request.token_ids[start : start + entry.num_tokens]
        for start, entry in zip(starts, scheduled, strict=True)
    )
    return np.fromiter(chain.from_iterable(chunks), dtype=np.int64)


def _lora_meta(
    scheduled: Sequence[ScheduledRequest], num_tokens: NDArray[np.int64], *, chunk_size: int, device: torch.device
) -> LoRAMeta | None:
    """Requests with one slots object share one selection of the step: to compare slot by slot would take longer."""
    distinct = {id(entry.slots): entry.slots for entry in scheduled if entry.slots is not None}
    if not distinct:
        return None
    places = {slots_id: place for place, slots_id in enumerate(distinct)}
    of_sequence = [places.get(id(entry.slots), -1) for entry in scheduled]
    token_selection = np.repeat(np.array(of_sequence, dtype=np.int32), num_tokens)
    return build_lora_meta(token_selection, list(distinct.values()), device=device, chunk_size=chunk_size)


def _prompt_rows(scheduled: Sequence[ScheduledRequest], query_start: NDArray[np.int64]) -> PromptRows:
    """The row at position p predicts token p + 1; the prompt's last row predicts output and is not among them.

    A request that has output delivered its prompt's logprobs with it, so a recomputed prompt has no rows.
    """
    rows, sequences = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    token_ids: list[int] = []
    for sequence, entry in enumerate(scheduled):
        request = entry.request
        if request.wants_prompt_logprobs and request.num_output_tokens == 0:
            first = request.num_computed_tokens
            predicted = request.prompt_token_ids[first + 1 : first + 1 + entry.num_tokens]
            rows.append(query_start[sequence] + np.arange(len(predicted)))
            sequences.append(np.full(len(predicted), sequence))
            token_ids += predicted
    return PromptRows(
        rows=np.concatenate(rows), token_ids=np.array(token_ids, np.int64), sequences=np.concatenate(sequences)
    )
