"""The A and B of every target module of one version, in host memory and in the source's dtype."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.lora.metadata import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWeights:
    """One module's pair. The parts of a fused module share the memory of their `lora_a`."""

    layer: int
    projection: Projection
    lora_a: Tensor  # [rank, in_features], the source's dtype
    lora_b: Tensor  # [out_features, rank]

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """Everything of one version that goes into slots; nothing is folded into A or B."""

    modules: tuple[ModuleWeights, ...]
    scaling: Tensor  # float32 [num_layers, len(Projection)]; 0 where there is no module
    num_bytes: int  # host memory of A and B

    def max_rank(self, *, attention: bool) -> int:
        ranks = [module.rank for module in self.modules if module.projection.is_attention is attention]
        return max(ranks, default=0)
