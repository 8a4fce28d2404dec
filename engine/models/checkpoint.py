"""A folder of safetensors: what it holds, known from the headers; no other weight format is ever opened."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loraplex.engine.errors import ConfigurationError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The headers of a folder's weight files."""

    files: tuple[Path, ...]
    headers: Mapping[str, TensorHeader]  # by tensor name
    file_of: Mapping[str, Path]

    @classmethod
    def open(cls, model_dir: Path) -> Checkpoint:
        """Read the headers of `model.safetensors`, or of the files that its index names.

        Raises:
            ConfigurationError: no safetensors, a file that is missing or damaged, an index with paths in it.
        """
        files = _weight_files(model_dir)
        headers: dict[str, TensorHeader] = {}
        file_of: dict[str, Path] = {}
        for file in files:
            for name, header in _read_headers(file).items():
                if name in headers:
                    raise ConfigurationError(f"{file_of[name].name} and {file.name} both hold {name}", param="model")
                headers[name], file_of[name] = header, file
        return cls(files=files, headers=headers, file_of=file_of)


def _weight_files(model_dir: Path) -> tuple[Path, ...]:
    if (model_dir / INDEX_NAME).exists():
        return _files_of_index(model_dir)
    if (model_dir / SINGLE_NAME).exists():
        return (model_dir / SINGLE_NAME,)
    raise ConfigurationError(
        f"{model_dir} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors are served, "
        "convert other weights with transformers' save_pretrained",
        param="model",
    )


def _files_of_index(model_dir: Path) -> tuple[Path, ...]:
    path = model_dir / INDEX_NAME
    try:
        names = sorted(set(msgspec.json.decode(path.read_bytes(), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"{path} is not a weight index: {error}", param="model") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ConfigurationError(f"{path} names {name!r}; only plain *.safetensors names are read", param="model")
        if not (model_dir / name).exists():
            raise ConfigurationError(f"{path} names {name}, which is missing; download the model again", param="model")
    return tuple(model_dir / name for name in names)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_headers(path: Path) -> dict[str, TensorHeader]:
    """The layout of https://huggingface.co/docs/safetensors: length, JSON header, one buffer."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"header of {length} bytes in a file of {size}")
            entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        headers = msgspec.convert(entries, dict[str, TensorHeader])
    except (OSError, ValueError, AttributeError) as error:  # msgspec.ValidationError is a ValueError
        raise ConfigurationError(f"{path} is not a safetensors file: {error}", param="model") from error
    for name, header in headers.items():
        _check_header(path, name, header, buffer_bytes=size - 8 - length)
    return headers


def _check_header(path: Path, name: str, header: TensorHeader, *, buffer_bytes: int) -> None:
    begin, end = header.data_offsets
    if not 0 <= begin <= end <= buffer_bytes:
        raise ConfigurationError(f"{path} is cut short: {name} lies outside of it", param="model")
    item_bytes = _DTYPE_BYTES.get(header.dtype)
    if item_bytes is not None and end - begin != math.prod(header.shape) * item_bytes:
        raise ConfigurationError(f"{path} is damaged: {name} has {end - begin} bytes", param="model")
