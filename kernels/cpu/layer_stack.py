"""All decoder layers of a model as one call into the library."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.arguments import batch_of, lora_batch_of, lora_slices_of, lora_table_of, slot_rank_of
from loraplex.kernels.cpu.linear import PanelLinear
from loraplex.kernels.dispatch import LayerWeights, PreparedLinear
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """The structures for one set of caches and pools, which it keeps alive."""

    kv_caches: Sequence[KVCache]
    pools: LoRAPools | None
    layers: ctypes.Array[native.Layer]
    model: native.Model


class CpuLayerStack:
    """Fills `LayerStack`. The weights of every layer are `PanelLinear`s of one dtype."""

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerWeights], fallbacks: Counter[str]) -> None:
        self._layers = layers
        self._fallbacks = fallbacks
        self._dtype = _panels(layers[0].qkv).dtype
        self._run = getattr(library, f"decoder_{native.SUFFIXES[self._dtype]}")
        self._bound: _Bound | None = None

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[KVCache],
        *,
        attention: AttentionMeta,
        lora: LoRAMeta | None,
        pools: LoRAPools | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        if pools is not None and pools.scaling.numel() and _pool_dtype(pools) not in native.POOL_TYPES:
            self._count_refusal(f"adapters in {_pool_dtype(pools)}")
            return None
        bound = self._bind(kv_caches, pools)
        shape, num_tokens = self._layers[0], len(hidden)
        residual = hidden.contiguous().clone()
        output = torch.empty_like(residual)
        scratch = [
            residual.new_empty(num_tokens, width)
            for width in (
                shape.hidden_size,
                shape.q_size + 2 * shape.kv_size,
                shape.q_size,
                2 * shape.intermediate_size,
                shape.intermediate_size,
            )
        ]
        shrunk = torch.empty(0 if lora is None else _shrunk_size(lora, bound.model.slot_rank))
        step = native.Step(
            num_tokens,
            residual.data_ptr(),
            output.data_ptr(),
            *(each.data_ptr() for each in scratch),
            shrunk.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            attention.slot_mapping.data_ptr(),
            batch_of(attention),
        )
        if lora is not None:
            step.lora = lora_batch_of(lora)
            step.attention_table = lora_table_of(lora.attention)
            step.mlp_table = lora_table_of(lora.mlp)
        self._run(
            torch.get_num_threads(),
            ctypes.addressof(bound.model),
            ctypes.addressof(step),
            ctypes.addressof(bound.layers),
            len(bound.layers),
        )
        return output, residual

    def _count_refusal(self, reason: str) -> None:
        if not self._fallbacks["layers"]:
            logger.warning("the CPU kernels compute a layer function by function: they cannot fuse %s", reason)
        self._fallbacks["layers"] += 1

    def _bind(self, kv_caches: Sequence[KVCache], pools: LoRAPools | None) -> _Bound:
        bound = self._bound
        if bound is None or bound.kv_caches is not kv_caches or bound.pools is not pools:
            layers = (native.Layer * len(self._layers))(
                *(
                    _layer_struct(weights, kv_cache, pools, index)
                    for index, (weights, kv_cache) in enumerate(zip(self._layers, kv_caches, strict=True))
                )
            )
            bound = _Bound(
                kv_caches=kv_caches, pools=pools, layers=layers, model=self._model_struct(kv_caches[0], pools)
            )
            self._bound = bound
        return bound

    def _model_struct(self, kv_cache: KVCache, pools: LoRAPools | None) -> native.Model:
        shape = self._layers[0]
        _, block_size, num_kv_heads, head_dim = kv_cache.key.shape
        return native.Model(
            native.HeadShape(shape.q_size // head_dim, num_kv_heads, head_dim, block_size),
            shape.hidden_size,
            shape.intermediate_size,
            0 if pools is None else slot_rank_of(pools),
            shape.rms_norm_eps,
            0 if pools is None else native.POOL_TYPES[_pool_dtype(pools)],
        )


def _layer_struct(weights: LayerWeights, kv_cache: KVCache, pools: LoRAPools | None, index: int) -> native.Layer:
    slices = (native.LoraSlice * len(Projection))() if pools is None else lora_slices_of(pools, index, list(Projection))
    return native.Layer(
        weights.input_norm.data_ptr(),
        weights.post_attention_norm.data_ptr(),
        None if weights.q_norm is None else weights.q_norm.data_ptr(),
        None if weights.k_norm is None else weights.k_norm.data_ptr(),
        *(_panels(linear).as_struct for linear in weights.linears),
        kv_cache.key.data_ptr(),
        kv_cache.value.data_ptr(),
        slices,
        weights.sliding_window or 0,
        weights.attention_scale,
        weights.has_rope,
    )


def _panels(linear: PreparedLinear) -> PanelLinear:
    assert isinstance(linear, PanelLinear), "prepared by another backend"
    return linear


def _pool_dtype(pools: LoRAPools) -> torch.dtype:
    return next(iter(pools.lora_a.values())).dtype


def _shrunk_size(lora: LoRAMeta, slot_rank: int) -> int:
    """Values that the largest shrink of a layer leaves: three fused projections of attention, or two of the MLP."""
    widths = 3 * lora.attention.slot_table.shape[1], 2 * lora.mlp.slot_table.shape[1]
    return lora.token_order.shape[0] * max(widths) * slot_rank
