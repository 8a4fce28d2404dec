"""Calls of every kernel at the demo model's shapes, each with the bytes and operations that it cannot do without.

A case has as many copies of what it reads as no cache of a processor holds, and a pass calls each copy once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.cpu import huge_pages
from loraplex.kernels.dispatch import Backend
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import Projection, SelectionSlots, WeightedSlot

COLD_BYTES = 160 * 2**20  # more than the caches of a processor
DTYPE = torch.bfloat16
CPU = torch.device("cpu")
BLOCK_SIZE = 16
SLOT_RANK = 8
HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
FUSED_PROJECTIONS = (
    (Projection.Q, Projection.K, Projection.V),
    (Projection.O,),
    (Projection.GATE, Projection.UP),
    (Projection.DOWN,),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """`calls` together are one pass; `num_bytes` and `flops` are those of one call."""

    kernel: str
    shape: str
    calls: Sequence[Callable[[], object]]
    num_bytes: float
    flops: float


def kernel_cases(backend: Backend, model_dir: Path) -> Iterator[KernelCase]:
    """One after the other, so that only one of them holds its memory."""
    yield from _linears(backend)
    yield from _attention(backend)
    yield from _lora(backend, model_dir)
    yield from _elementwise(backend)
    yield from _decode_steps(backend, model_dir)


def _linears(backend: Backend) -> Iterator[KernelCase]:
    shapes = {"qkv": (HIDDEN, 960), "gate_up": (HIDDEN, 2 * INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}
    for name, (inputs, outputs) in shapes.items():
        yield from _linear(backend, f"linear {name}", inputs, outputs, rows=(1, 8, 32, 64, 1024))
    yield from _linear(backend, "lm head", HIDDEN, VOCABULARY, rows=(1, 64))


def _linear(backend: Backend, name: str, inputs: int, outputs: int, *, rows: Sequence[int]) -> Iterator[KernelCase]:
    weight_bytes = inputs * outputs * DTYPE.itemsize
    copies = _copies(weight_bytes)
    weights = [backend.prepare_linear(torch.randn(outputs, inputs, dtype=DTYPE), None) for _ in range(copies)]
    for num_rows in rows:
        x = torch.randn(num_rows, inputs, dtype=DTYPE)
        yield KernelCase(
            kernel=name,
            shape=f"{num_rows} x {inputs} -> {outputs}",
            calls=[partial(backend.linear, x, weight) for weight in weights],
            num_bytes=weight_bytes,
            flops=2 * num_rows * inputs * outputs,
        )


def _attention(backend: Backend) -> Iterator[KernelCase]:
    scale = HEAD_DIM**-0.5
    token_bytes = 2 * NUM_KV_HEADS * HEAD_DIM * DTYPE.itemsize
    for kind, num_seqs, query_len, context in (
        ("decode", 1, 1, 512),
        ("decode", 16, 1, 512),
        ("decode", 64, 1, 512),
        ("prefill", 1, 512, 0),
        ("prefill", 4, 512, 0),
    ):
        cached_bytes = num_seqs * (context + query_len) * token_bytes
        copies = _copies(cached_bytes) if kind == "decode" else 8
        cache, metas = _caches(num_seqs, query_len, context, copies)
        q = torch.randn(num_seqs * query_len, NUM_HEADS, HEAD_DIM, dtype=DTYPE)
        seen = num_seqs * query_len * (context + (query_len + 1) / 2)  # query-key pairs; a prompt sees itself halfway
        yield KernelCase(
            kernel=f"attention {kind}",
            shape=f"{num_seqs} x {query_len} after {context}",
            calls=[
                partial(backend.paged_attention, q, cache, meta, scale=scale, sliding_window=None) for meta in metas
            ],
            num_bytes=cached_bytes,
            flops=4 * NUM_HEADS * HEAD_DIM * seen,
        )


def _caches(num_seqs: int, query_len: int, context: int, copies: int) -> tuple[KVCache, list[AttentionMeta]]:
    """One big cache, and `copies` batches that each have blocks of their own in it."""
    per_seq = -(-(context + query_len) // BLOCK_SIZE)
    shape = (copies * num_seqs * per_seq, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    key, value = (huge_pages.empty(*shape, dtype=DTYPE, device=CPU).normal_() for _ in range(2))
    cache = KVCache(key=key, value=value)
    block_ids = np.random.default_rng(0).permutation(shape[0]).reshape(copies, num_seqs, per_seq)
    return cache, [_attention_meta(ids.tolist(), query_len, context) for ids in block_ids]


def _attention_meta(block_ids: list[list[int]], query_len: int, context: int) -> AttentionMeta:
    count = len(block_ids)
    return build_attention_meta(
        query_lens=[query_len] * count,
        context_lens=[context] * count,
        block_ids=block_ids,
        block_size=BLOCK_SIZE,
        device=CPU,
    )


def _lora(backend: Backend, model_dir: Path) -> Iterator[KernelCase]:
    """All projections of one layer; ranks 8, 16, 32, 64 in turn where adapters differ, 32 where all use one."""
    for popularity, num_tokens, ranks in (
        ("identical", 1, [32]),
        ("identical", 64, [32]),
        ("identical", 1024, [32]),
        ("distinct", 16, [8, 16, 32, 64] * 4),
        ("distinct", 64, [8, 16, 32, 64] * 16),
        ("distinct", 1024, [8, 16, 32, 64]),
    ):
        yield _lora_case(backend, model_dir, popularity, num_tokens, ranks)


def _lora_case(backend: Backend, model_dir: Path, popularity: str, num_tokens: int, ranks: list[int]) -> KernelCase:
    base = build_base_spec(model_dir)
    per_rank = sum(base.in_features[projection] + base.out_features[projection] for projection in Projection)
    layer_bytes = sum(ranks) * per_rank * DTYPE.itemsize
    base = replace(base, num_layers=_copies(layer_bytes))
    num_slots = sum(ranks) // SLOT_RANK
    pools = SlotTensors.allocate(base, num_slots=num_slots, slot_rank=SLOT_RANK, dtype=DTYPE, device="cpu").pools
    for pool in (*pools.lora_a.values(), *pools.lora_b.values(), pools.scaling):
        pool.fill_(0.01)
    token_selection = np.arange(num_tokens, dtype=np.int32) % len(ranks)
    meta = build_lora_meta(token_selection, _selections(ranks), device=CPU, chunk_size=backend.lora_chunk_size)
    inputs = {projections: torch.randn(num_tokens, base.in_features[projections[0]], dtype=DTYPE)
              for projections in FUSED_PROJECTIONS}  # fmt: skip
    outputs = {projections: torch.zeros(num_tokens, sum(base.out_features[each] for each in projections), dtype=DTYPE)
               for projections in FUSED_PROJECTIONS}  # fmt: skip

    def add_all(layer: int) -> None:
        for projections in FUSED_PROJECTIONS:
            x, y = inputs[projections], outputs[projections]
            backend.lora_apply(x, y, pools, layer=layer, projections=projections, meta=meta)

    rank_rows = sum(ranks[selection] for selection in token_selection)
    return KernelCase(
        kernel=f"LoRA {popularity}",
        shape=f"{num_tokens} tokens, {len(ranks)} adapters of mean rank {sum(ranks) // len(ranks)}",
        calls=[partial(add_all, layer) for layer in range(base.num_layers)],
        num_bytes=layer_bytes,
        flops=2 * rank_rows * per_rank,
    )


def _selections(ranks: list[int]) -> list[SelectionSlots]:
    selections, first = [], 0
    for rank in ranks:
        slots = tuple(WeightedSlot(first + index, 1.0) for index in range(rank // SLOT_RANK))
        selections.append(SelectionSlots(attention=slots, mlp=slots))
        first += len(slots)
    return selections


def _elementwise(backend: Backend) -> Iterator[KernelCase]:
    tokens = 1024
    hidden = [torch.randn(tokens, HIDDEN, dtype=DTYPE) for _ in range(_copies(tokens * HIDDEN * DTYPE.itemsize))]
    weight = torch.ones(HIDDEN, dtype=DTYPE)
    size = tokens * HIDDEN * DTYPE.itemsize
    yield _memory_case("RMSNorm", hidden, lambda x: backend.rms_norm(x, weight, 1e-5), num_bytes=2 * size)
    yield _memory_case("add + RMSNorm", hidden, lambda x: backend.add_rms_norm(x, x, weight, 1e-5), num_bytes=4 * size)
    heads = [x.view(tokens, NUM_HEADS, HEAD_DIM) for x in hidden]
    keys = torch.randn(tokens, NUM_KV_HEADS, HEAD_DIM, dtype=DTYPE)
    cos, sin = torch.randn(2, tokens, HEAD_DIM, dtype=DTYPE)
    key_bytes = keys.numel() * DTYPE.itemsize
    yield _memory_case("rotary", heads, lambda q: backend.rotary(q, keys, cos, sin), num_bytes=2 * (size + key_bytes))
    gate_up = [torch.randn(tokens, 2 * INTERMEDIATE, dtype=DTYPE) for _ in range(28)]
    gate_bytes = tokens * INTERMEDIATE * DTYPE.itemsize
    yield _memory_case("SiLU and multiply", gate_up, backend.silu_and_mul, num_bytes=3 * gate_bytes)
    cache, metas = _caches(1, tokens, 0, _copies(2 * key_bytes))
    store = [meta.slot_mapping for meta in metas]
    yield _memory_case(
        "KV store", store, lambda slots: backend.store_kv(keys, keys, cache, slots), num_bytes=4 * key_bytes
    )


def _memory_case(
    name: str, inputs: Sequence[Tensor], call: Callable[[Tensor], object], *, num_bytes: float
) -> KernelCase:
    """Reads and writes, next to no operations."""
    shape = " x ".join(map(str, inputs[0].shape))
    return KernelCase(
        kernel=name, shape=shape, calls=[partial(call, each) for each in inputs], num_bytes=num_bytes, flops=0
    )


def _decode_steps(backend: Backend, model_dir: Path) -> Iterator[KernelCase]:
    """The whole model, as it serves: embeddings to logits, every layer of it in as few calls as the backend takes."""
    model = load_model(model_dir, read_model_config(model_dir), backend=backend, dtype=DTYPE, device=CPU)
    context = 256
    blocks = context // BLOCK_SIZE + 1
    caches = model.allocate_kv_caches(64 * blocks, BLOCK_SIZE)
    for num_seqs in (1, 16, 64):
        ids = np.arange(num_seqs * blocks).reshape(num_seqs, blocks).tolist()
        meta = ForwardMeta(attention=_attention_meta(ids, 1, context), lora=None, pools=None)
        tokens, positions = torch.arange(num_seqs), torch.full((num_seqs,), context)

        def step(tokens: Tensor = tokens, positions: Tensor = positions, meta: ForwardMeta = meta) -> Tensor:
            return model.compute_logits(model.forward(tokens, positions, caches, meta))

        cached = num_seqs * context * model.kv_block_bytes(BLOCK_SIZE) / BLOCK_SIZE
        weights = 30 * (HIDDEN * (960 + HIDDEN + 3 * INTERMEDIATE)) + HIDDEN * VOCABULARY
        yield KernelCase(
            kernel="whole decode step",
            shape=f"{num_seqs} rows after {context}",
            calls=[step] * 3,
            num_bytes=weights * DTYPE.itemsize + cached,
            flops=2 * num_seqs * weights + 30 * 4 * NUM_HEADS * HEAD_DIM * num_seqs * context,
        )


def _copies(num_bytes: float) -> int:
    return max(2, int(COLD_BYTES // num_bytes))
