"""The backend for NVIDIA GPUs, in Triton. Import it where Triton is installed only.

Not run on a GPU so far: the tests check its numbers in Triton's interpreter and compile every kernel ahead of time for
compute capability 8.0, 8.6 and 9.0 (spills, shared memory). Neither shows races, a launch that fails or a speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from loraplex.kernels import triton_elementwise as elementwise
from loraplex.kernels.attention import triton as attention
from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.attention.triton_heads import norm_rotary_store
from loraplex.kernels.dispatch import PreparedLinear
from loraplex.kernels.lora import triton as lora
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection
from loraplex.kernels.quant.metadata import W4Linear, W4Weight
from loraplex.kernels.quant.triton import w4_linear
from loraplex.kernels.reference import PlainLinear, row_maximum
from loraplex.kernels.triton_configs import ARCHITECTURES, LORA_BLOCK_M


class TritonBackend:
    """Fills `Backend` (see there for the contracts). Linear layers are cuBLAS's, through torch.

    No function waits for the device, and every grid follows from shapes and from host integers of the metadata, so a
    batch of fixed capacity can be captured in a CUDA graph: padding is a chunk of selection -1, a sequence of length
    0 and a slot mapping of -1.
    """

    name = "triton"
    lora_chunk_size = LORA_BLOCK_M

    def __init__(self, architecture: int) -> None:
        """`architecture`: a key of the configuration table, see `triton_configs.nearest_architecture`."""
        assert architecture in ARCHITECTURES, f"no configurations for architecture {architecture}"
        self._architecture = architecture

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return {}

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        return PlainLinear(weight=weight, bias=bias)

    def prepare_w4(self, weight: W4Weight, bias: Tensor | None, dtype: torch.dtype) -> PreparedLinear:
        return W4Linear(weight=weight, bias=None if bias is None else bias.to(dtype))

    def linear(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if isinstance(weight, W4Linear):
            return w4_linear(x, weight, architecture=self._architecture)
        assert isinstance(weight, PlainLinear), "prepared by another backend"
        return weight.forward(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return elementwise.add_rms_norm(x, residual, weight, eps)

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return elementwise.rotary(q, k, cos, sin)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return elementwise.silu_and_mul(gate_up)

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        attention.store_kv(key, value, cache, slot_mapping)

    def norm_rotary_store(self, qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor) -> Tensor:
        return norm_rotary_store(qkv, transform, cache, slot_mapping)

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        return attention.paged_attention(
            q, cache, meta, scale=scale, sliding_window=sliding_window, architecture=self._architecture
        )

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
        lora.lora_apply(x, y, pools, layer=layer, projections=projections, meta=meta, architecture=self._architecture)

    def row_maximum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return row_maximum(values)
