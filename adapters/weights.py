"""The A and B of every target module of one version, in host memory and in the source's dtype."""

from __future__ import annotations

from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.folder import adapter_root, open_regular
from loraplex.adapters.inspection import read_plan
from loraplex.adapters.layout import ModuleLayout
from loraplex.adapters.refusals import Refusals, shown
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.values import count_bad_values, refuse_bad_values
from loraplex.kernels.lora.metadata import Projection

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


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


def load_weights(folder: Path, base: BaseSpec) -> AdapterWeights:
    """Read, check again (also the values) and map the tensors of `folder`.

    Raises:
        AdapterRefusedError: the folder would not be accepted as an upload.
        OSError: a file cannot be read.
    """
    root, refusals = adapter_root(folder), Refusals()
    plan = read_plan(root, base, refusals)
    refusals.raise_if_any()
    tensors = _read_tensors(root, plan.entries, refusals)
    refusals.raise_if_any()
    scaling = torch.zeros(base.num_layers, len(Projection), dtype=torch.float32)
    modules: list[ModuleWeights] = []
    for layout in plan.layouts:
        for spec in layout.specs:
            scaling[spec.layer, spec.projection] = layout.scaling
        modules += _split(layout, tensors[layout.lora_a.name], tensors[layout.lora_b.name])
    num_bytes = sum(entry.num_bytes for entry in plan.entries)
    return AdapterWeights(modules=tuple(modules), scaling=scaling, num_bytes=num_bytes)


def _split(layout: ModuleLayout, lora_a: Tensor, lora_b: Tensor) -> list[ModuleWeights]:
    rows = torch.split_with_sizes(lora_b, [spec.out_features for spec in layout.specs])
    return [
        ModuleWeights(layer=spec.layer, projection=spec.projection, lora_a=lora_a, lora_b=part)
        for spec, part in zip(layout.specs, rows, strict=True)
    ]


def _read_tensors(root: Path, entries: list[TensorEntry], refusals: Refusals) -> dict[str, Tensor]:
    files = sorted({entry.file for entry in entries})
    tensors: dict[str, Tensor] = {}
    for name in files:
        with open_regular(root / name) as file:
            for entry in entries:
                if entry.file == name:
                    tensors[entry.name] = _read_tensor(file, entry, refusals)
    return tensors


def _read_tensor(file: BufferedReader, entry: TensorEntry, refusals: Refusals) -> Tensor:
    """Own memory per tensor; its size was compared with the file's when the header was read."""
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    raw = tensor.view(torch.uint8).numpy().data.cast("B")
    file.seek(entry.start)
    if file.readinto(raw) != entry.num_bytes:
        refusals.add("file_truncated", f"{shown(entry.file)} ended while it was read", file=entry.file)
    elif num_bad := count_bad_values(raw, entry.dtype):
        refuse_bad_values(entry, num_bad, refusals)
    return tensor
