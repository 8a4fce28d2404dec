"""The most memory that one step takes beside weights, slots and the KV cache."""

from __future__ import annotations

import torch

from loraplex.adapters.ref import BASE
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.request import Request
from loraplex.engine.runner.decode_graphs import DecodeGraphs, EagerRecorder
from loraplex.engine.runner.model_runner import MAX_PROMPT_LOGITS_ROWS, ModelRunner
from loraplex.engine.runner.row_pieces import MAX_ROWS
from loraplex.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.engine.scheduler_output import ScheduledRequest, SchedulerOutput

_FLOAT32_BYTES = 4
_GATHERED_RANK = 64  # of A and B that a backend gathers for each sequence
_SCRATCH_BYTES = 32  # per row and token of the vocabulary, while tokens are drawn or described
_GRAPH_SCRATCH_BYTES = 128 << 20  # of cuBLAS on the capturing stream, and the partial sums of adapters


def measure_peak_activations(
    model: DecoderModel, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> int:
    """Bytes at the peak of the largest step.

    On a GPU this is measured by profiling runs. A CPU has no allocator that could tell, and a full step of a small
    model takes seconds there, so the sum of all activations of one layer serves as the bound.
    """
    if model.device.type == "cuda":
        return _profiled_bytes(
            model,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
    return activation_bound(
        model.config,
        itemsize=model.dtype.itemsize,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )


def measure_graph_memory(model: DecoderModel, *, block_size: int, max_num_seqs: int, max_model_len: int) -> int:
    """Bytes that recorded decode steps hold for ever: static buffers, and the activations that all graphs share.

    They come on top of the peak of other steps, since a graph's memory serves nothing else.
    """
    before = _reset_peak(model.device)
    graphs = DecodeGraphs(
        model,
        model.allocate_kv_caches(1, block_size),
        None,
        EagerRecorder(),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    graphs.compute_largest()
    return _peak_since(model.device, before) + _GRAPH_SCRATCH_BYTES


def activation_bound(
    config: ModelConfig, *, itemsize: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> int:
    """An upper bound in bytes from the shapes alone, for a backend that computes a layer operation by operation."""
    layer = max_num_batched_tokens * _elements_per_token(config) * _FLOAT32_BYTES
    attention = _attention_bytes(config, num_queries=min(max_num_batched_tokens, max_model_len), num_keys=max_model_len)
    adapters = max_num_seqs * _GATHERED_RANK * 2 * _widest(config) * _FLOAT32_BYTES
    head = _head_bytes(config, itemsize=itemsize, max_num_seqs=max_num_seqs)
    return max(layer + attention + adapters, head)


def _elements_per_token(config: ModelConfig) -> int:
    """Values that live at once in one layer, each counted as float32.

    The hidden states, the residual, and their copies while they are normalised; then either q, k, v before and after
    rotation and what was attended, or gate and up with their product; and the input and the delta of adapters.
    """
    hidden = 6 * config.hidden_size
    attention = 4 * (config.q_size + 2 * config.kv_size)
    mlp = 4 * config.intermediate_size
    return hidden + max(attention, mlp) + 4 * _widest(config)


def _attention_bytes(config: ModelConfig, *, num_queries: int, num_keys: int) -> int:
    """One sequence's gathered keys and values, and its mask as booleans and as numbers."""
    gathered = 2 * 2 * num_keys * config.kv_size * _FLOAT32_BYTES
    return gathered + num_queries * num_keys * (1 + _FLOAT32_BYTES)


def _widest(config: ModelConfig) -> int:
    return max(config.hidden_size, config.q_size, config.intermediate_size)


def _head_bytes(config: ModelConfig, *, itemsize: int, max_num_seqs: int) -> int:
    """Logits in the model's dtype and float32, a copy for logprobs, and the scratch of the rows in work."""
    num_rows = max(max_num_seqs, MAX_PROMPT_LOGITS_ROWS)
    return config.vocab_size * (num_rows * (itemsize + 2 * _FLOAT32_BYTES) + MAX_ROWS * _SCRATCH_BYTES)


def profile_batches(
    *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> tuple[SchedulerOutput, ...]:
    """The two shapes that peak: as few sequences as hold all tokens, and as many sequences as may run.

    Every sequence asks for the costliest sampling. All of them share the same blocks, whose content is of no
    interest: `max_model_len` tokens' worth of blocks is enough for all.
    """
    longest = min(max_num_batched_tokens, max_model_len)
    few = [longest] * (max_num_batched_tokens // longest)
    many = [max(min(max_num_batched_tokens // max_num_seqs, longest), 1)] * max_num_seqs
    return tuple(
        SchedulerOutput(scheduled=tuple(_profile_request(length, block_size) for length in lengths))
        for lengths in (few[:max_num_seqs], many)
    )


def _profile_request(num_tokens: int, block_size: int) -> ScheduledRequest:
    request = Request(
        request_id="profile",
        prompt_token_ids=[0] * num_tokens,
        sampling_params=SamplingParams(
            top_p=0.5, presence_penalty=1.0, logprobs=MAX_LOGPROBS, prompt_logprobs=MAX_LOGPROBS
        ),
        max_tokens=1,
        seed=0,
        eos_token_ids=frozenset(),
        selection=BASE,
        arrival_time=0.0,
        block_ids=list(range(-(-num_tokens // block_size))),
    )
    return ScheduledRequest(request=request, num_tokens=num_tokens, slots=None)


def _profiled_bytes(
    model: DecoderModel, *, block_size: int, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> int:
    num_blocks = -(-max_model_len // block_size)
    runner = ModelRunner(model, model.allocate_kv_caches(num_blocks, block_size), None, block_size=block_size)
    before = _reset_peak(model.device)
    for batch in profile_batches(
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    ):
        runner.execute(batch)
    return _peak_since(model.device, before)


def _reset_peak(device: torch.device) -> int:
    """Bytes allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak_since(device: torch.device, before: int) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
