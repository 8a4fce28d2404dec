"""From a version's files to its weights in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.digest import folder_digest
from loraplex.adapters.errors import AdapterLoadError
from loraplex.adapters.folder import adapter_root, open_regular
from loraplex.adapters.inspection import AdapterPlan, read_plan
from loraplex.adapters.layout import ModuleLayout
from loraplex.adapters.refusals import Refusals, shown
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.source import AdapterSource
from loraplex.adapters.turns import PIECE_BYTES, Piece, unpaced
from loraplex.adapters.values import (
    count_bad_values,
    count_rounded_values,
    refuse_bad_values,
    refuse_rounded_values,
)
from loraplex.adapters.weights import AdapterWeights, ModuleWeights
from loraplex.kernels.lora.metadata import Projection

_DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class FolderReader:
    """An `AdapterReader` for the folders that a source brings to this machine, into slots of `slot_dtype`."""

    def __init__(self, base: BaseSpec, source: AdapterSource, *, slot_dtype: torch.dtype = torch.float32) -> None:
        self._base = base
        self._source = source
        self._slot_dtype = slot_dtype

    def read(self, digest: str, piece: Piece) -> AdapterWeights:
        folder = self._source.fetch(digest, piece)
        weights = load_weights(folder, self._base, piece, slot_dtype=self._slot_dtype)
        # Hashed after they were read: files that changed since `fetch` checked them are found out, too.
        found = folder_digest(folder, piece)
        if found != digest:
            raise AdapterLoadError(f"the files of version {digest} were altered: their digest is {found}")
        return weights


def load_weights(
    folder: Path, base: BaseSpec, piece: Piece = unpaced, *, slot_dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    """Read, check again (also the values) and map the tensors of `folder`.

    Raises:
        AdapterRefusedError: the folder would not be accepted as an upload, or slots of `slot_dtype` would round it.
        OSError: a file cannot be read.
    """
    root, refusals = adapter_root(folder), Refusals()
    plan = read_plan(root, base, refusals, piece=piece)
    refusals.raise_if_any()
    tensors = _read_tensors(root, plan.entries, refusals, piece, slot_dtype)
    refusals.raise_if_any()
    with piece():
        return _assemble(plan, tensors, base)


def _assemble(plan: AdapterPlan, tensors: Mapping[str, Tensor], base: BaseSpec) -> AdapterWeights:
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


def _read_tensors(
    root: Path, entries: list[TensorEntry], refusals: Refusals, piece: Piece, slot_dtype: torch.dtype
) -> dict[str, Tensor]:
    files = sorted({entry.file for entry in entries})
    tensors: dict[str, Tensor] = {}
    for name in files:
        with open_regular(root / name) as file:
            for entry in entries:
                if entry.file == name:
                    tensors[entry.name] = _read_tensor(file, entry, refusals, piece, slot_dtype)
    return tensors


def _read_tensor(
    file: BufferedReader, entry: TensorEntry, refusals: Refusals, piece: Piece, slot_dtype: torch.dtype
) -> Tensor:
    """Own memory per tensor; its size was compared with the file's when the header was read."""
    tensor = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
    raw = tensor.view(torch.uint8).numpy().data.cast("B")
    slots_in = str(slot_dtype).removeprefix("torch.")
    num_bad = num_rounded = 0
    file.seek(entry.start)
    for start in range(0, entry.num_bytes, PIECE_BYTES):
        part = raw[start : start + PIECE_BYTES]
        if file.readinto(part) != len(part):
            refusals.add("file_truncated", f"{shown(entry.file)} ended while it was read", file=entry.file)
            return tensor
        with piece():
            num_bad += count_bad_values(part, entry.dtype)
            num_rounded += count_rounded_values(part, entry.dtype, slots_in)
    if num_bad:
        refuse_bad_values(entry, num_bad, refusals)
    elif num_rounded:
        refuse_rounded_values(entry, num_rounded, slots_in, refusals)
    return tensor
