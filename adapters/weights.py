"""The A and B of every target module of one version, in host memory and in the source's dtype."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from loraplex.adapters.base_spec import BaseSpec
from loraplex.kernels.lora.metadata import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleWeights:
    layer: int
    projection: Projection
    lora_a: Tensor  # [rank, in_features], the source's dtype
    lora_b: Tensor  # [out_features, rank]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    modules: tuple[ModuleWeights, ...]
    scaling: Tensor  # float32 [num_layers, len(Projection)]; 0 where there is no module
    num_bytes: int


def load_weights(folder: Path, base: BaseSpec) -> AdapterWeights:
    """Read, check again (also the values) and map the tensors of `folder`.

    Raises:
        AdapterRefusedError: the folder would not be accepted as an upload.
    """
    raise NotImplementedError
