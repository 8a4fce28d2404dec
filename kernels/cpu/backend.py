"""The backend in C++ for CPUs, for float32 and bfloat16; anything else takes the reference's way, counted."""

from __future__ import annotations

import ctypes
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loraplex.kernels.attention import composed
from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.arguments import batch_of, lora_batch_of, lora_slices_of, lora_table_of, slot_rank_of
from loraplex.kernels.cpu.build import build
from loraplex.kernels.cpu.huge_pages import WeightMemory
from loraplex.kernels.cpu.layer_stack import CpuLayerStack
from loraplex.kernels.cpu.linear import PanelLinear
from loraplex.kernels.dispatch import LayerStack, LayerWeights, PreparedLinear
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection
from loraplex.kernels.quant.metadata import W4Weight
from loraplex.kernels.quant.reference import dequantize
from loraplex.kernels.reference import ReferenceBackend

logger = logging.getLogger(__name__)


class CpuBackend:
    """Fills `Backend` (see there for the contracts) with calls into the compiled library.

    Every result is a function of its own row: neither neighbours nor the number of threads change a bit of it.
    """

    name = "cpu"
    lora_chunk_size = 16

    def __init__(self, device: torch.device, *, library: ctypes.CDLL | None = None) -> None:
        """Compile or find the library, unless it is given.

        Raises:
            NativeBuildError: it cannot be compiled or loaded here.
        """
        self.library = native.load(build()) if library is None else library
        self.fallbacks: Counter[str] = Counter()  # calls that took the reference's way, by function
        self._weights = WeightMemory()
        self._reference = ReferenceBackend(device)
        logger.info("CPU kernels: %s", self.library.loraplex_instruction_set().decode())

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        if weight.dtype not in native.SUFFIXES:
            return self._fall_back("linear", weight.dtype).prepare_linear(weight, bias)
        return PanelLinear.pack(self.library, self._weights, weight, bias)

    def prepare_w4(self, weight: W4Weight, bias: Tensor | None, dtype: torch.dtype) -> PreparedLinear:
        """Widened once, to `dtype`: there is no kernel for 4 bits here. Counted, since it takes the memory."""
        if not self.fallbacks["w4"]:
            logger.warning("the CPU kernels have no 4-bit linear layers: their weights are widened to %s", dtype)
        self.fallbacks["w4"] += 1
        return self.prepare_linear(dequantize(weight, dtype), None if bias is None else bias.to(dtype))

    def linear(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if not isinstance(weight, PanelLinear):
            return self._fall_back("linear", x.dtype).linear(x, weight)
        assert x.dtype == weight.dtype, "activations and weight have the model's dtype"
        x = _rows(x)
        y = x.new_empty(len(x), weight.out_features)
        self._call("linear", x.dtype)(
            torch.get_num_threads(), x.data_ptr(), x.stride(0), ctypes.addressof(weight.as_struct), y.data_ptr(), len(x)
        )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype not in native.SUFFIXES:
            return self._fall_back("rms_norm", x.dtype).rms_norm(x, weight, eps)
        x = x if x.stride(-1) == 1 else x.contiguous()
        wide = x.unsqueeze(1) if x.dim() == 2 else x
        output = torch.empty(x.shape, dtype=x.dtype)
        num_outer, num_inner, size = wide.shape
        self._call("rms_norm", x.dtype)(
            torch.get_num_threads(), wide.data_ptr(), wide.stride(1), wide.stride(0), num_inner,
            weight.data_ptr(), eps, output.data_ptr(), num_outer * num_inner, size,
        )  # fmt: skip
        return output

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if x.dtype not in native.SUFFIXES:
            return self._fall_back("add_rms_norm", x.dtype).add_rms_norm(x, residual, weight, eps)
        x, residual = x.contiguous(), residual.contiguous()
        total, output = torch.empty_like(x), torch.empty_like(x)
        self._call("add_rms_norm", x.dtype)(
            torch.get_num_threads(), x.data_ptr(), residual.data_ptr(), weight.data_ptr(), eps,
            total.data_ptr(), output.data_ptr(), len(x), x.shape[-1],
        )  # fmt: skip
        return output, total

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if q.dtype not in native.SUFFIXES:
            return self._fall_back("rotary", q.dtype).rotary(q, k, cos, sin)
        return self._turned(q, cos, sin), self._turned(k, cos, sin)

    def _turned(self, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = heads.clone(memory_format=torch.contiguous_format)
        self._call("rotary", heads.dtype)(
            torch.get_num_threads(), turned.data_ptr(), cos.data_ptr(), sin.data_ptr(), *turned.shape
        )
        return turned

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype not in native.SUFFIXES:
            return self._fall_back("silu_and_mul", gate_up.dtype).silu_and_mul(gate_up)
        gate_up = gate_up.contiguous()
        output = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        self._call("silu_and_mul", gate_up.dtype)(
            torch.get_num_threads(), gate_up.data_ptr(), output.data_ptr(), *output.shape
        )
        return output

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        if key.dtype not in native.SUFFIXES:
            return self._fall_back("store_kv", key.dtype).store_kv(key, value, cache, slot_mapping)
        assert key.dtype == value.dtype == cache.key.dtype, "the cache has the model's dtype"
        key, value = _rows_of_heads(key), _rows_of_heads(value)
        self._call("store_kv", key.dtype)(
            torch.get_num_threads(), key.data_ptr(), value.data_ptr(), key.stride(0), value.stride(0),
            cache.key.data_ptr(), cache.value.data_ptr(), slot_mapping.data_ptr(),
            len(key), key.shape[1] * key.shape[2],
        )  # fmt: skip

    def norm_rotary_store(self, qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor) -> Tensor:
        return composed.norm_rotary_store(self, qkv, transform, cache, slot_mapping)

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        if q.dtype not in native.SUFFIXES:
            reference = self._fall_back("paged_attention", q.dtype)
            return reference.paged_attention(q, cache, meta, scale=scale, sliding_window=sliding_window)
        assert q.dtype == cache.key.dtype, "the cache has the model's dtype"
        q = _rows_of_heads(q)
        output = torch.empty(q.shape, dtype=q.dtype)
        given = native.AttentionInput(
            q.data_ptr(), q.stride(0), cache.key.data_ptr(), cache.value.data_ptr(), scale, sliding_window or 0
        )
        shape = native.HeadShape(q.shape[1], cache.key.shape[2], q.shape[2], cache.key.shape[1])
        batch = batch_of(meta)
        self._call("attention", q.dtype)(
            torch.get_num_threads(), ctypes.addressof(given), ctypes.addressof(shape),
            ctypes.addressof(batch), output.data_ptr(),
        )  # fmt: skip
        return output

    def row_maximum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        if values.dtype not in native.SUFFIXES:
            return self._fall_back("row_maximum", values.dtype).row_maximum(values)
        values = values.contiguous()
        places = torch.empty(len(values), dtype=torch.int64)
        is_finite = torch.empty(len(values), dtype=torch.bool)
        self._call("row_maximum", values.dtype)(
            torch.get_num_threads(), values.data_ptr(), places.data_ptr(), is_finite.data_ptr(), *values.shape
        )
        return places, is_finite

    def lora_apply(
        self,
        x: Tensor,
        y: Tensor,
        pools: LoRAPools,
        *,
        layer: int,
        projections: Sequence[Projection],
        meta: LoRAMeta | None,
    ) -> None:
        if meta is None:
            return
        pool_dtype = pools.lora_a[projections[0]].dtype
        if x.dtype not in native.SUFFIXES or pool_dtype not in native.POOL_TYPES:
            reference = self._fall_back("lora_apply", x.dtype if x.dtype not in native.SUFFIXES else pool_dtype)
            reference.lora_apply(x, y, pools, layer=layer, projections=projections, meta=meta)
            return
        assert y.stride(-1) == 1, "the rows of y are written in place"
        x = _rows(x)
        space = meta.attention if projections[0].is_attention else meta.mlp
        shrunk = torch.empty(
            len(projections) * meta.token_order.shape[0] * space.slot_table.shape[1] * slot_rank_of(pools)
        )
        slices = lora_slices_of(pools, layer, projections)
        job = native.LoraJob(
            x.data_ptr(), x.stride(0), x.shape[1], y.data_ptr(), y.stride(0),
            slices, len(slices), slot_rank_of(pools), shrunk.data_ptr(),
        )  # fmt: skip
        batch, table = lora_batch_of(meta), lora_table_of(space)
        self._call("lora", x.dtype)(
            torch.get_num_threads(), ctypes.addressof(job), ctypes.addressof(batch), ctypes.addressof(table),
            native.POOL_TYPES[pool_dtype],
        )  # fmt: skip

    def fuse_layers(self, layers: Sequence[LayerWeights]) -> LayerStack | None:
        """All layers in one call, when every weight of them is in panels."""
        if not all(isinstance(linear, PanelLinear) for layer in layers for linear in layer.linears):
            return None
        return CpuLayerStack(self.library, layers, self.fallbacks)

    def _call(self, function: str, dtype: torch.dtype) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self.library, f"{function}_{native.SUFFIXES[dtype]}")
        return call

    def _fall_back(self, function: str, dtype: torch.dtype) -> ReferenceBackend:
        if not self.fallbacks[function]:
            logger.warning("the CPU kernels have no %s for %s: the reference computes it", function, dtype)
        self.fallbacks[function] += 1
        return self._reference


def _rows(x: Tensor) -> Tensor:
    """`x [T, n]` with the values of a row beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_of_heads(x: Tensor) -> Tensor:
    """`x [T, heads, head_dim]` with the heads of a token beside each other."""
    return x if x.stride(-1) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
