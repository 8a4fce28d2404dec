"""Inputs for every function of a backend at a model's shapes, with the bytes and operations that they cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.shapes import RANKS, SLOT_RANK
from loraplex.engine.layers.rotary import RotaryEmbedding
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.weight_names import projection_shape
from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.dispatch import Backend
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from loraplex.kernels.quant.metadata import NIBBLES, W4Weight

BLOCK_SIZE = 16
W4_GROUP_SIZE = 128
FUSIONS = {
    "qkv": (Projection.Q, Projection.K, Projection.V),
    "o": (Projection.O,),
    "gate_up": (Projection.GATE, Projection.UP),
    "down": (Projection.DOWN,),
}
POPULARITIES = ("identical", "distinct", "uniform", "zipf")


Compute = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """`prepare(backend, dtype)` gives the computation on inputs in that dtype, which may be wider than their values."""

    name: str
    prepare: Callable[[Backend, torch.dtype], Compute]
    num_bytes: float = 0  # read and written at least once
    num_flops: float = 0
    is_timed: bool = True


class Cases:
    """All cases of one model. Inputs have the values of `dtype`, also where they are widened for the reference."""

    def __init__(
        self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, num_tokens: int, context: int
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._num_tokens = num_tokens  # of a decode batch
        self._context = context  # keys of a decode, tokens of a prefill
        self._generator = torch.Generator(device).manual_seed(1)

    def all(self) -> Iterator[KernelCase]:
        yield from (self._rms_norm(), self._add_rms_norm(), self._silu_and_mul(), self._rotary(), self._store_kv())
        yield self._norm_rotary_store()
        decodes = [self._context - 1] * self._num_tokens
        yield self._attention("decode attention", [1] * self._num_tokens, decodes)
        yield self._attention("prefill attention", [self._context], [0])
        odd = ("decode attention, odd lengths", [1] * 8, [0, 1, 14, 15, 16, 100, 255, 256])
        chunks = ("chunked prefills beside decodes", [1, 1, 37, 64], [5, 300, 90, 0])
        for name, query_lens, context_lens in (odd, chunks):
            yield self._attention(name, query_lens, context_lens, is_timed=False)
        for fusion, projections in FUSIONS.items():
            for popularity in POPULARITIES:
                yield self._lora(f"lora {fusion}, {popularity}", projections, popularity, self._num_tokens)
            yield self._lora(f"lora {fusion}, a prefill", projections, "identical", self._context)
        for num_tokens in (1, self._num_tokens, self._context):
            yield self._w4(num_tokens, is_permuted=False)
        yield self._w4(self._num_tokens, is_permuted=True)

    def _rms_norm(self) -> KernelCase:
        x, weight = self._random(self._num_tokens, self._config.hidden_size), self._random(self._config.hidden_size)

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            wide_x, wide_weight = x.to(dtype), weight.to(dtype)
            return lambda: [backend.rms_norm(wide_x, wide_weight, self._config.rms_norm_eps)]

        return KernelCase(name="rms_norm", prepare=prepare, num_bytes=2 * x.nbytes)

    def _add_rms_norm(self) -> KernelCase:
        shape = (self._num_tokens, self._config.hidden_size)
        x, residual, weight = self._random(*shape), self._random(*shape), self._random(shape[1])

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            wide = x.to(dtype), residual.to(dtype), weight.to(dtype)
            return lambda: backend.add_rms_norm(*wide, self._config.rms_norm_eps)

        return KernelCase(name="add_rms_norm", prepare=prepare, num_bytes=4 * x.nbytes)

    def _silu_and_mul(self) -> KernelCase:
        gate_up = self._random(self._num_tokens, 2 * self._config.intermediate_size)

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            wide = gate_up.to(dtype)
            return lambda: [backend.silu_and_mul(wide)]

        return KernelCase(name="silu_and_mul", prepare=prepare, num_bytes=1.5 * gate_up.nbytes)

    def _rotary(self) -> KernelCase:
        config = self._config
        q, k, _ = self._qkv(self._num_tokens)
        positions = torch.arange(self._num_tokens, device=self._device)
        angles = RotaryEmbedding(config.rope, config.head_dim, self._device).cos_sin(positions, self._dtype)

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            wide_q, wide_k, cos, sin = (tensor.to(dtype) for tensor in (q, k, *angles))
            return lambda: backend.rotary(wide_q, wide_k, cos, sin)

        return KernelCase(name="rotary", prepare=prepare, num_bytes=2 * (_bytes(q) + _bytes(k)))

    def _store_kv(self) -> KernelCase:
        config, num_tokens = self._config, self._num_tokens
        _, k, v = self._qkv(num_tokens)
        shape = (num_tokens, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        places = torch.randperm(num_tokens * BLOCK_SIZE, generator=self._generator, device=self._device)[:num_tokens]

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            cache = KVCache(
                key=torch.zeros(shape, dtype=dtype, device=self._device),
                value=torch.zeros(shape, dtype=dtype, device=self._device),
            )
            wide_k, wide_v = k.to(dtype), v.to(dtype)

            def compute() -> Sequence[Tensor]:
                backend.store_kv(wide_k, wide_v, cache, places)
                return [cache.key, cache.value]

            return compute

        return KernelCase(name="store_kv", prepare=prepare, num_bytes=2 * (_bytes(k) + _bytes(v)))

    def _norm_rotary_store(self) -> KernelCase:
        config, num_tokens = self._config, self._num_tokens
        qkv = self._random(num_tokens, config.q_size + 2 * config.kv_size)
        norms = self._random(config.head_dim), self._random(config.head_dim)
        positions = torch.arange(num_tokens, device=self._device)
        angles = RotaryEmbedding(config.rope, config.head_dim, self._device).cos_sin(positions, self._dtype)
        shape = (num_tokens, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        places = torch.randperm(num_tokens * BLOCK_SIZE, generator=self._generator, device=self._device)[:num_tokens]

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            q_norm, k_norm, cos, sin = (tensor.to(dtype) for tensor in (*norms, *angles))
            transform = HeadTransform(q_norm=q_norm, k_norm=k_norm, eps=config.rms_norm_eps, cos=cos, sin=sin)
            cache = KVCache(
                key=torch.zeros(shape, dtype=dtype, device=self._device),
                value=torch.zeros(shape, dtype=dtype, device=self._device),
            )
            wide = qkv.to(dtype)
            return lambda: [backend.norm_rotary_store(wide.clone(), transform, cache, places), cache.key, cache.value]

        return KernelCase(name="norm_rotary_store", prepare=prepare, num_bytes=2 * qkv.nbytes)

    def _w4(self, num_tokens: int, *, is_permuted: bool) -> KernelCase:
        size, out_features = self._config.hidden_size, self._config.intermediate_size
        words = (size // NIBBLES, out_features)
        limits = torch.iinfo(torch.int32)
        order = torch.randperm(size, generator=self._generator, device=self._device).int()
        scales = (0.02 + 0.01 * self._random(-(-size // W4_GROUP_SIZE), out_features).abs()).half()
        weight = W4Weight(
            qweight=torch.randint(limits.min, limits.max, words, generator=self._generator, device=self._device).int(),
            scales=scales,
            scaled_zeros=8 * scales.float(),
            group_size=W4_GROUP_SIZE,
            perm=order if is_permuted else None,
        )
        x = self._random(num_tokens, size)

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            linear, wide = backend.prepare_w4(weight, None, dtype), x.to(dtype)
            return lambda: [backend.linear(wide, linear)]

        return KernelCase(
            name=f"4-bit linear, {num_tokens} rows{', act-order' if is_permuted else ''}",
            prepare=prepare,
            num_bytes=weight.nbytes + x.nbytes + num_tokens * out_features * x.itemsize,
            num_flops=2 * num_tokens * size * out_features,
        )

    def _attention(
        self, name: str, query_lens: list[int], context_lens: list[int], *, is_timed: bool = True
    ) -> KernelCase:
        config = self._config
        lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        meta, num_blocks = self._attention_meta(query_lens, context_lens, lens)
        shape = (num_blocks, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        keys, values = self._random(*shape), self._random(*shape)
        q, _, _ = self._qkv(sum(query_lens))

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            cache, wide = KVCache(key=keys.to(dtype), value=values.to(dtype)), q.to(dtype)
            scale = config.head_dim**-0.5
            return lambda: [backend.paged_attention(wide, cache, meta, scale=scale, sliding_window=None)]

        pairs = sum(query * (length - (query - 1) / 2) for query, length in zip(query_lens, lens, strict=True))
        return KernelCase(
            name=name,
            prepare=prepare,
            num_bytes=2 * sum(lens) * config.kv_size * self._dtype.itemsize + 2 * _bytes(q),
            num_flops=4 * pairs * config.q_size,
            is_timed=is_timed,
        )

    def _attention_meta(
        self, query_lens: list[int], context_lens: list[int], lens: list[int]
    ) -> tuple[AttentionMeta, int]:
        counts = [-(-length // BLOCK_SIZE) for length in lens]
        order = np.random.default_rng(0).permutation(sum(counts)).tolist()
        ends = np.cumsum(counts).tolist()
        meta = build_attention_meta(
            query_lens=query_lens,
            context_lens=context_lens,
            block_ids=[order[end - count : end] for end, count in zip(ends, counts, strict=True)],
            block_size=BLOCK_SIZE,
            device=self._device,
        )
        return meta, sum(counts)

    def _lora(self, name: str, projections: Sequence[Projection], popularity: str, num_tokens: int) -> KernelCase:
        shapes = {each: projection_shape(self._config, each) for each in projections}
        ranks = [RANKS[index % len(RANKS)] for index in range(min(self._num_tokens, 64))]
        selections, chosen = list(_selections(ranks)), _chosen(popularity, num_tokens, len(ranks))
        num_slots = sum(ranks) // SLOT_RANK
        lora_a = {each: self._pool(num_slots, shape[1]) for each, shape in shapes.items()}
        lora_b = {each: self._pool(num_slots, shape[0]) for each, shape in shapes.items()}
        scaling = torch.ones(1, len(Projection), num_slots, device=self._device)
        x = self._random(num_tokens, shapes[projections[0]][1])
        base = self._random(num_tokens, sum(shape[0] for shape in shapes.values()))

        def prepare(backend: Backend, dtype: torch.dtype) -> Compute:
            pools = LoRAPools(lora_a=_all_to(lora_a, dtype), lora_b=_all_to(lora_b, dtype), scaling=scaling)
            meta = build_lora_meta(chosen, selections, device=self._device, chunk_size=backend.lora_chunk_size)
            wide_x, y = x.to(dtype), base.to(dtype, copy=True)

            def compute() -> Sequence[Tensor]:
                backend.lora_apply(wide_x, y, pools, layer=0, projections=projections, meta=meta)
                return [y]

            return compute

        adapted = chosen[chosen >= 0]
        per_rank = sum(sum(shape) for shape in shapes.values())
        used = sum(ranks[index] for index in np.unique(adapted))
        return KernelCase(
            name=name,
            prepare=prepare,
            num_bytes=used * per_rank * self._dtype.itemsize + x.nbytes + 2 * base.nbytes,
            num_flops=2 * sum(ranks[index] for index in adapted) * per_rank,
        )

    def _pool(self, num_slots: int, features: int) -> Tensor:
        return self._random(1, num_slots, SLOT_RANK, features).mul_(features**-0.5)

    def _qkv(self, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused projection, as the model has them."""
        config = self._config
        fused = self._random(num_tokens, config.q_size + 2 * config.kv_size)
        q, k, v = torch.split(fused, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        heads = (num_tokens, -1, config.head_dim)
        return q.view(heads), k.view(heads), v.view(heads)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self._device).to(self._dtype)


def _selections(ranks: Sequence[int]) -> Iterator[SelectionSlots]:
    first = 0
    for rank in ranks:
        slots = tuple(WeightedSlot(slot, 1.0) for slot in range(first, first + rank // SLOT_RANK))
        first += len(slots)
        yield SelectionSlots(slots, slots)


def _all_to(tensors: Mapping[Projection, Tensor], dtype: torch.dtype) -> dict[Projection, Tensor]:
    return {projection: tensor.to(dtype) for projection, tensor in tensors.items()}


def _bytes(view: Tensor) -> int:
    return view.numel() * view.element_size()


def _chosen(popularity: str, num_tokens: int, num_selections: int) -> NDArray[np.int32]:
    random = np.random.default_rng(2)
    match popularity:
        case "identical":
            chosen = np.full(num_tokens, num_selections - 1)
        case "distinct":
            chosen = np.arange(num_tokens) % num_selections
        case "uniform":
            chosen = random.integers(-1, num_selections, num_tokens)  # -1: some rows of the base
        case _:
            chosen = np.minimum(random.zipf(1.5, num_tokens) - 1, num_selections - 1)
    return chosen.astype(np.int32)
