"""A linear layer of the base with the adapters' deltas on top: the only place that applies LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.dispatch import Backend, PreparedLinear
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRALinear:
    """One projection, or several fused ones, of one decoder layer."""

    backend: Backend
    weight: PreparedLinear
    layer: int
    projections: Sequence[Projection]  # in the order of their outputs

    def forward(self, x: Tensor, lora: LoRAMeta | None, pools: LoRAPools | None) -> Tensor:
        """`x [T, in]` -> `[T, out]`; rows without a selection are the base's bit for bit."""
        y = self.backend.linear(x, self.weight)
        if lora is not None:
            assert pools is not None, "tokens with a selection, but no pools"
            self.backend.lora_apply(x, y, pools, layer=self.layer, projections=self.projections, meta=lora)
        return y
