"""The header of one safetensors file, parsed by ourselves first: what it names must be exactly what the file holds.

Layout of the format: 8 bytes little-endian header length, that many bytes of JSON
(`name -> {dtype, shape, data_offsets}`), then the tensors' bytes without hole or overlap. Nothing is allocated by
a number that the file states before that number was compared with the file's real size.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, TypeGuard

from loraplex.adapters.errors import AdapterRefusedError
from loraplex.adapters.folder import open_regular
from loraplex.adapters.refusals import Refusals, refused, shown
from loraplex.adapters.strict_json import JsonError, JsonObject, parse_json_object

MAX_HEADER_BYTES: Final = 16 << 20
MAX_TENSORS: Final = 20_000
DTYPE_BYTES: Final = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # what LoRA weights may come in

_MAX_NDIM: Final = 8
_MAX_NAME_CHARS: Final = 1_024
_REUPLOAD: Final = "upload the file again; check that it was written and copied to its end"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    file: str
    dtype: str  # a key of DTYPE_BYTES
    shape: tuple[int, ...]
    start: int  # bytes from the start of the file
    num_bytes: int


def read_header(path: Path, refusals: Refusals) -> list[TensorEntry]:
    """The tensors of the file at `path`, in the order of their bytes; faults go to `refusals`.

    Raises:
        OSError: it cannot be read.
    """
    with refusals.collecting(), open_regular(path) as file:
        return _HeaderParser(path.name, os.fstat(file.fileno()).st_size, refusals).parse(file)
    return []


class _HeaderParser:
    def __init__(self, file_name: str, file_bytes: int, refusals: Refusals) -> None:
        self._file_name = file_name
        self._file_bytes = file_bytes
        self._refusals = refusals

    def parse(self, file: BinaryIO) -> list[TensorEntry]:
        fields = self._read_json(file)
        data_start = file.tell()
        metadata = fields.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._fault("header_invalid", "has a __metadata__ that is not an object of strings")
        if len(fields) > MAX_TENSORS:
            raise self._fault("too_many_tensors", f"has {len(fields)} tensors; at most {MAX_TENSORS} are allowed")
        parsed = [self._entry(name, value, data_start) for name, value in fields.items()]
        entries = sorted((entry for entry in parsed if entry is not None), key=lambda entry: entry.start)
        if len(entries) == len(parsed):
            self._check_coverage(entries, data_start)
        return entries

    def _read_json(self, file: BinaryIO) -> JsonObject:
        if self._file_bytes < 8:
            what = "is empty" if self._file_bytes == 0 else f"is {self._file_bytes} bytes long"
            raise self._fault("header_truncated", f"{what}: shorter than the 8 bytes of a safetensors header length")
        num_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes > MAX_HEADER_BYTES:
            fault = f"states a header of {num_bytes} bytes: too large (at most {MAX_HEADER_BYTES}), or not safetensors"
            raise self._fault("header_too_large", fault)
        if num_bytes > self._file_bytes - 8:
            fault = f"is truncated: its header is {num_bytes} bytes long, longer than the file"
            raise self._fault("header_truncated", fault)
        try:
            return parse_json_object(file.read(num_bytes), max_bytes=MAX_HEADER_BYTES, max_items=8 * MAX_TENSORS)
        except JsonError as error:
            raise self._fault("header_invalid", f"has an invalid safetensors header: it {error}") from error

    def _entry(self, name: str, value: object, data_start: int) -> TensorEntry | None:
        fault = _entry_fault(name, value)
        if fault is not None or not isinstance(value, dict):
            self._refusals.add(
                "tensor_entry_invalid",
                f"{shown(self._file_name)}: tensor {shown(name)} {fault}",
                file=self._file_name,
                tensor=name,
            )
            return None
        start, end = value["data_offsets"]
        return TensorEntry(
            name=name,
            file=self._file_name,
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            start=data_start + start,
            num_bytes=end - start,
        )

    def _check_coverage(self, entries: list[TensorEntry], data_start: int) -> None:
        """The tensors' bytes must be the file's bytes: no hole, no overlap, nothing after them."""
        position = data_start
        for entry in entries:
            if entry.start != position:
                fault = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
                fault = f"has an invalid offset: tensor {shown(entry.name)} {fault}"
                raise self._fault("offset_invalid", fault, tensor=entry.name)
            position += entry.num_bytes
        if position > self._file_bytes:
            fault = f"is truncated: its tensors need {position} bytes, the file has {self._file_bytes}"
            raise self._fault("file_truncated", fault)
        if position < self._file_bytes:
            fault = f"has {self._file_bytes - position} bytes after the last tensor, which no tensor covers"
            raise self._fault("trailing_bytes", fault)

    def _fault(self, code: str, fault: str, *, tensor: str | None = None) -> AdapterRefusedError:
        message = f"{shown(self._file_name)} {fault}"
        return refused(code, message, file=self._file_name, tensor=tensor, remedy=_REUPLOAD)


def _entry_fault(name: str, value: object) -> str | None:
    if len(name) > _MAX_NAME_CHARS:
        return f"has a name of {len(name)} characters; at most {_MAX_NAME_CHARS} are allowed"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return "must have exactly dtype, shape and data_offsets"
    dtype = value["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        return f"has the unknown or unsupported dtype {shown(str(dtype))}; allowed are {', '.join(DTYPE_BYTES)}"
    return _shape_fault(value["shape"]) or _offsets_fault(value["data_offsets"], value["shape"], DTYPE_BYTES[dtype])


def _shape_fault(shape: object) -> str | None:
    if not _is_list_of_sizes(shape) or len(shape) > _MAX_NDIM:
        return f"has the shape {shown(str(shape))}; a list of at most {_MAX_NDIM} whole numbers is allowed"
    if 0 in shape:
        return f"is empty: its shape is {shape}. Files saved under DeepSpeed ZeRO-3 look so: gather the weights first"
    if math.prod(shape) >= 1 << 63:
        return f"has the shape {shown(str(shape))}, whose size overflows"
    return None


def _offsets_fault(offsets: object, shape: list[int], item_bytes: int) -> str | None:
    if not _is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        return f"has invalid data_offsets {shown(str(offsets))}"
    expected = math.prod(shape) * item_bytes
    if offsets[1] - offsets[0] != expected:
        return f"has {offsets[1] - offsets[0]} bytes by its offsets, {expected} by its shape {shape}: invalid offset"
    return None


def _is_list_of_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
