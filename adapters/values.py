"""Are all values of an adapter finite, also in float16, and do its slots hold them as they are? Torch-free.

float16 is the narrowest of the serving dtypes, so what is finite there is finite in all of them. A value is bad when
its magnitude, read as an unsigned integer, reaches that of the smallest number that float16 rounds to infinity
(65520): infinities and NaN have still larger bit patterns, so one comparison finds all three.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from loraplex.adapters.errors import Reason
from loraplex.adapters.folder import adapter_root, open_regular
from loraplex.adapters.refusals import Refusals, shown
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.tensor_index import read_tensor_index

_CHUNK_BYTES: Final = 4 << 20


class _Limit(NamedTuple):
    dtype: npt.DTypeLike  # of the raw values, as unsigned integers
    magnitude_mask: int
    first_bad: int  # magnitude bits of the smallest value that is not finite in float16


_LIMITS: Final = {
    "F16": _Limit("<u2", 0x7FFF, 0x7C00),  # infinity
    "BF16": _Limit("<u2", 0x7FFF, 0x4780),  # 65536: the next above 65280
    "F32": _Limit("<u4", 0x7FFF_FFFF, 0x477F_F000),  # 65520
    "F64": _Limit("<u8", 0x7FFF_FFFF_FFFF_FFFF, 0x40EF_FDFF_F000_0000),  # rounds to 65520 in float32
}


def check_values(folder: Path) -> list[Reason]:
    """One reason per tensor that holds NaN, infinity or a magnitude that float16 cannot."""
    root, refusals = adapter_root(folder), Refusals()
    entries = read_tensor_index(root, refusals) or []
    by_file: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    for name, tensors in by_file.items():
        with open_regular(root / name) as file:
            for entry in tensors:
                _check_tensor(file, entry, refusals)
    return refusals.reasons


def count_bad_values(raw: bytes | memoryview, dtype: str) -> int:
    """How many values of `raw` (safetensors `dtype`) are not finite in float16."""
    limit = _LIMITS[dtype]
    bits = np.frombuffer(raw, dtype=limit.dtype)
    return int(np.count_nonzero((bits & bits.dtype.type(limit.magnitude_mask)) >= limit.first_bad))


def refuse_bad_values(entry: TensorEntry, num_bad: int, refusals: Refusals) -> None:
    refusals.add(
        "values_not_finite",
        f"tensor {shown(entry.name)} has {num_bad} non-finite values (NaN, infinity, or above 65504 in magnitude, "
        "which float16 cannot hold)",
        file=entry.file,
        tensor=entry.name,
        remedy="check that the training did not diverge; large values: rescale lora_A against lora_B",
    )


@np.errstate(over="ignore")  # what float16 cannot hold is refused anyway
def count_rounded_values(raw: bytes | memoryview, dtype: str, slot_dtype: str) -> int:
    """How many finite values of `raw` (safetensors `dtype`) are another number in slots of `slot_dtype`.

    Float64 counts as its float32: no slots are wider, and PEFT computes with no more either.
    """
    if slot_dtype == "float32" or (dtype, slot_dtype) in (("F16", "float16"), ("BF16", "bfloat16")):
        return 0
    values = _as_float32(raw, dtype)
    if slot_dtype == "bfloat16":
        return int(np.count_nonzero(values.view(np.uint32) & 0xFFFF))
    return int(np.count_nonzero(values.astype(np.float16).astype(np.float32) != values))


def refuse_rounded_values(entry: TensorEntry, num_rounded: int, slot_dtype: str, refusals: Refusals) -> None:
    refusals.add(
        "values_rounded",
        f"tensor {shown(entry.name)} has {num_rounded} values in {entry.dtype} that adapter slots in {slot_dtype} "
        "would round; serve it with --lora-dtype float32",
        file=entry.file,
        tensor=entry.name,
        remedy=f"serve with --lora-dtype float32, or save the adapter in {slot_dtype}",
    )


def _as_float32(raw: bytes | memoryview, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "BF16":
        return (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, dtype={"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).astype(np.float32)


def _check_tensor(file: BinaryIO, entry: TensorEntry, refusals: Refusals) -> None:
    file.seek(entry.start)
    num_bad, num_left = 0, entry.num_bytes
    while num_left:
        chunk = file.read(min(num_left, _CHUNK_BYTES))
        num_left -= len(chunk)
        num_bad += count_bad_values(chunk, entry.dtype)
        if not chunk:
            refusals.add("file_truncated", f"{shown(entry.file)} ended while it was read", file=entry.file)
            return
    if num_bad:
        refuse_bad_values(entry, num_bad, refusals)
