"""All tensors of an adapter's folder: one file, or shards named by an index."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from loraplex.adapters.file_names import INDEX_FILE, WEIGHTS_FILE, is_shard_file
from loraplex.adapters.folder import open_regular, version_files
from loraplex.adapters.refusals import Refusals, refused, shown
from loraplex.adapters.safetensors_header import TensorEntry, read_header
from loraplex.adapters.strict_json import JsonError, parse_json_object

_MAX_INDEX_BYTES = 16 << 20
_REMEDY = f"save the adapter again as one {WEIGHTS_FILE}"


def read_tensor_index(folder: Path, refusals: Refusals) -> list[TensorEntry] | None:
    """Every tensor of the folder's safetensors files; None when it is not known which tensors there are."""
    faults = Refusals()
    entries: list[TensorEntry] = []
    with faults.collecting():
        entries = _read(folder, faults)
    refusals.extend(faults.reasons)
    return None if faults else entries


def _read(folder: Path, faults: Refusals) -> list[TensorEntry]:
    names = version_files(folder)
    shards = [name for name in names if is_shard_file(name)]
    if WEIGHTS_FILE in names:
        if shards or INDEX_FILE in names:
            message = f"both {WEIGHTS_FILE} and shards or an index are there; which ones count?"
            raise refused("weights_ambiguous", message, file=WEIGHTS_FILE, remedy=_REMEDY)
        return _read_headers(folder, [WEIGHTS_FILE], faults)
    if INDEX_FILE in names:
        return _read_shards(folder, shards, faults)
    missing = f"{INDEX_FILE} is missing beside the shards" if shards else f"{WEIGHTS_FILE} is missing"
    raise refused("weights_missing", missing, file=INDEX_FILE if shards else WEIGHTS_FILE, remedy=_REMEDY)


def _read_shards(folder: Path, shards: list[str], faults: Refusals) -> list[TensorEntry]:
    weight_map = _read_weight_map(folder)
    named = set(weight_map.values())
    for name in sorted(named.symmetric_difference(shards)):
        message = f"{shown(name)} is there, but {INDEX_FILE} does not name it"
        if not is_shard_file(name):
            message = f"{INDEX_FILE} names {shown(name)}, which is not a plain shard file name"
        elif name in named:
            message = f"{INDEX_FILE} names {shown(name)}, which is missing"
        faults.add("shard_mismatch", message, file=INDEX_FILE, remedy=_REMEDY)
    entries = _read_headers(folder, shards, faults)
    if not faults:
        _check_weight_map(weight_map, entries, faults)
    return entries


def _read_weight_map(folder: Path) -> dict[str, str]:
    try:
        with open_regular(folder / INDEX_FILE) as file:
            index = parse_json_object(file.read(_MAX_INDEX_BYTES + 1), max_bytes=_MAX_INDEX_BYTES)
    except JsonError as error:
        raise refused("index_invalid", f"{INDEX_FILE} {error}", file=INDEX_FILE, remedy=_REMEDY) from error
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        message = f"{INDEX_FILE} must have a weight_map from tensor names to file names"
        raise refused("index_invalid", message, file=INDEX_FILE, remedy=_REMEDY)
    return weight_map


def _check_weight_map(weight_map: dict[str, str], entries: list[TensorEntry], faults: Refusals) -> None:
    found = {(entry.name, entry.file) for entry in entries}
    for name, file in sorted(set(weight_map.items()) ^ found):
        where = (
            "declared by the index, but not in" if (name, file) not in found else "not declared by the index, but in"
        )
        message = f"tensor {shown(name)} is {where} {shown(file)}"
        faults.add("shard_mismatch", message, file=file, tensor=name, remedy=_REMEDY)


def _read_headers(folder: Path, names: list[str], faults: Refusals) -> list[TensorEntry]:
    entries = [entry for name in names for entry in read_header(folder / name, faults)]
    for name, num in Counter(entry.name for entry in entries).items():
        if num > 1:
            faults.add("tensor_duplicate", f"tensor {shown(name)} is in {num} files", tensor=name, remedy=_REMEDY)
    return entries
