"""The backend in plain torch: obviously right, and vectorised enough to be used."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.attention import composed
from loraplex.kernels.attention import reference as attention
from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.dispatch import PreparedLinear
from loraplex.kernels.lora import reference as lora
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection
from loraplex.kernels.quant.metadata import W4Linear, W4Weight
from loraplex.kernels.quant.reference import w4_linear

logger = logging.getLogger(__name__)

# oneDNN chooses the packed layout for about this many rows; any number may be served.
_PACKED_FOR_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLinear:
    """The weight as it came."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.weight) + _nbytes(self.bias)

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A bf16 weight in oneDNN's own layout: `F.linear` would pack it again in every call, at up to twice the time."""

    packed: Tensor  # opaque, [out, in]
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return self.packed.shape[1]

    @property
    def out_features(self) -> int:
        return self.packed.shape[0]

    @property
    def nbytes(self) -> int:
        return _nbytes(self.packed) + _nbytes(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


class ReferenceBackend:
    """Fills `Backend` (see there for the contracts)."""

    name = "reference"
    lora_chunk_size = 8

    def __init__(self, device: torch.device) -> None:
        self.packs_bfloat16 = device.type == "cpu" and _can_pack()
        if device.type == "cpu" and not self.packs_bfloat16:
            logger.warning("this torch cannot prepack bfloat16 weights: linear layers take up to twice the time")

    @property
    def fallbacks(self) -> Mapping[str, int]:
        return {}

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        if self.packs_bfloat16 and weight.dtype == torch.bfloat16:
            return PackedLinear(packed=_pack(weight), bias=bias)
        return PlainLinear(weight=weight, bias=bias)

    def prepare_w4(self, weight: W4Weight, bias: Tensor | None, dtype: torch.dtype) -> PreparedLinear:
        return W4Linear(weight=weight, bias=None if bias is None else bias.to(dtype))

    def linear(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        if isinstance(weight, W4Linear):
            return w4_linear(x, weight)
        assert isinstance(weight, PlainLinear | PackedLinear), "prepared by another backend"
        return weight.forward(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        attention.store_kv(key, value, cache, slot_mapping)

    def norm_rotary_store(self, qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor) -> Tensor:
        return composed.norm_rotary_store(self, qkv, transform, cache, slot_mapping)

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        return attention.paged_attention(q, cache, meta, scale=scale, sliding_window=sliding_window)

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
        lora.lora_apply(x, y, pools, layer=layer, projections=projections, meta=meta)

    def row_maximum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        return row_maximum(values)


def row_maximum(values: Tensor) -> tuple[Tensor, Tensor]:
    """See `Backend.row_maximum`. `argmax` documents the first among equals; both extremes carry a NaN on."""
    is_finite = values.amax(dim=-1).isfinite() & values.amin(dim=-1).isfinite()
    return values.argmax(dim=-1), is_finite


def _can_pack() -> bool:
    """Whether this build has the (private) packed form and it gives what `F.linear` gives."""
    weight = torch.linspace(-1, 1, 32 * 64).view(32, 64).bfloat16()
    x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16()
    try:
        packed = PackedLinear(packed=_pack(weight), bias=None).forward(x)
    except (AttributeError, RuntimeError) as error:
        logger.debug("no packed linear: %s", error)
        return False
    return torch.allclose(packed.float(), F.linear(x, weight).float(), rtol=1e-2, atol=1e-2)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
