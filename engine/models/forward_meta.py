"""What one forward pass needs besides tokens and caches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardMeta:
    """Built once per step by the runner."""

    attention: AttentionMeta
    lora: LoRAMeta | None  # None: no token has a selection
    pools: LoRAPools | None  # None: the engine serves no adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMeta:
    """The same, with what the model adds once for all its layers."""

    attention: AttentionMeta
    lora: LoRAMeta | None
    pools: LoRAPools | None
    cos: Tensor  # [T, head_dim], in the model's dtype
    sin: Tensor
