"""Malformed uploads, made from one good adapter: each breaks one thing and says which."""

from __future__ import annotations

import io
import json
import pickle
import stat
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

Files = dict[str, bytes]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def bad_uploads(good: Path) -> dict[str, tuple[str, Files]]:
    """Case name -> (what the answer should name, the files)."""
    files = {name: (good / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    cases: dict[str, tuple[str, Files]] = {}
    for name, (should_say, change) in _CASES.items():
        cases[name] = (should_say, change(dict(files)))
    for name, (should_say, entries) in _zip_cases(files).items():
        cases[name] = (should_say, {f"{name}.zip": entries})
    return cases


def write_fixtures(root: Path, good: Path) -> None:
    """Lay the cases out as a folder of fixtures: `bad/<case>/...`, `bad/<case>.zip`, `bad/manifest.json`."""
    manifest = {}
    for name, (should_say, files) in bad_uploads(good).items():
        manifest[name] = {"expect": should_say}
        is_archive = next(iter(files)).endswith(".zip")
        folder = root / "bad" if is_archive else root / "bad" / name
        folder.mkdir(parents=True, exist_ok=True)
        for file_name, content in files.items():
            (folder / file_name).write_bytes(content)
    (root / "bad" / "manifest.json").write_text(json.dumps(manifest))


class Payload:
    """Unpickling this would be running a stranger's code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('unpickled')",))


def _config(**changes: Any) -> Callable[[Files], Files]:
    def change(files: Files) -> Files:
        settings = json.loads(files[CONFIG]) | changes
        return files | {CONFIG: json.dumps(settings).encode()}

    return change


def _raw_config(text: str) -> Callable[[Files], Files]:
    return lambda files: files | {CONFIG: text.encode()}


def _weights(transform: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Files], Files]:
    return lambda files: files | {WEIGHTS: save(transform(load(files[WEIGHTS])))}


def _first(transform: Callable[[Tensor], Tensor]) -> Callable[[Files], Files]:
    """Change the first A (sorted by name)."""

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        name = min(name for name in tensors if "lora_A" in name)
        return tensors | {name: transform(tensors[name]).contiguous()}

    return _weights(change)


def _renamed(old: str, new: str) -> Callable[[Files], Files]:
    return _weights(lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()})


def _poisoned(value: float) -> Callable[[Tensor], Tensor]:
    def poison(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[0, 0] = value
        return tensor

    return poison


def _without_one_b(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    name = min(name for name in tensors if "lora_B" in name)
    return {key: tensor for key, tensor in tensors.items() if key != name}


def _header(header: bytes, body: bytes = b"", length: int | None = None) -> Callable[[Files], Files]:
    content = struct.pack("<Q", len(header) if length is None else length) + header + body
    return lambda files: files | {WEIGHTS: content}


_CASES: dict[str, tuple[str, Callable[[Files], Files]]] = {
    "truncated_body": ("shorter than declared", lambda f: f | {WEIGHTS: f[WEIGHTS][:-100]}),
    "truncated_header": ("header longer than the file", lambda f: f | {WEIGHTS: f[WEIGHTS][:50]}),
    "empty_file": ("empty", lambda f: f | {WEIGHTS: b""}),
    "header_overflow": ("header too large", _header(b"{}", length=2**63 - 1)),
    "header_not_json": ("not JSON", _header(b"{not json}")),
    "trailing_garbage": ("bytes after the last tensor", lambda f: f | {WEIGHTS: f[WEIGHTS] + b"garbage!"}),
    "pickle_named_safetensors": ("not a safetensors file", lambda f: f | {WEIGHTS: pickle.dumps(Payload())}),
    "pickle_bin": (
        ".bin is refused",
        lambda f: {CONFIG: f[CONFIG], "adapter_model.bin": pickle.dumps(Payload())},
    ),
    "config_missing": ("adapter_config.json", lambda f: {WEIGHTS: f[WEIGHTS]}),
    "config_not_json": ("JSON", _raw_config('{"r": 8, ')),
    "config_not_object": ("object", _raw_config("[1, 2]")),
    "config_deep": ("too deep", _raw_config("[" * 100_000 + "]" * 100_000)),
    "config_duplicate_key": ("twice", _raw_config('{"peft_type": "LORA", "r": 8, "r": 16, "lora_alpha": 16}')),
    "config_nan_alpha": ("finite", _config(lora_alpha=float("nan"))),
    "config_rank_zero": ("at least 1", _config(r=0)),
    "config_rank_huge": ("256", _config(r=10**9)),
    "config_rank_string": ("int", _config(r="8")),
    "config_rank_lies": ("rank", _config(r=4)),
    "config_dora": ("use_dora", _config(use_dora=True)),
    "config_pissa": ("init_lora_weights", _config(init_lora_weights="pissa")),
    "config_vera": ("peft_type", _config(peft_type="VERA")),
    "config_layer_replication": ("layer_replication", _config(layer_replication=[[0, 1], [0, 1]])),
    "config_empty_alora": ("alora_invocation_tokens", _config(alora_invocation_tokens=[])),
    "nan": ("finite", _first(_poisoned(float("nan")))),
    "infinity": ("finite", _first(_poisoned(float("inf")))),
    "beyond_float16": ("float16", _first(_poisoned(1e6))),
    "integer_weights": ("dtype", _first(lambda tensor: torch.ones_like(tensor, dtype=torch.int32))),
    "three_dimensions": ("2-D", _first(lambda tensor: tensor.unsqueeze(0))),
    "half_the_width": ("in_features", _first(lambda tensor: tensor[:, ::2])),
    "other_rank": ("rank", _first(lambda tensor: tensor[::2])),
    "unknown_layers": ("layers.99", _renamed("layers.1.", "layers.99.")),
    "unknown_module": ("foo_proj", _renamed("q_proj", "foo_proj")),
    "foreign_prefix": ("28 of 28", _renamed("model.layers", "model.language_tower.layers")),
    "missing_b": ("lora_B", _weights(_without_one_b)),
    "no_tensors": ("no LoRA tensors", _weights(lambda tensors: {})),
}


def _zip_cases(files: Files) -> dict[str, tuple[str, bytes]]:
    good = list(files.items())
    return {
        "zip_traversal": ("path", _zip([*good, ("../../escaped", b"x")])),
        "zip_absolute": ("path", _zip([*good, ("/tmp/escaped", b"x")])),
        "zip_backslash": ("path", _zip([*good, ("..\\escaped", b"x")])),
        "zip_many_files": ("files", _zip([*good, *((f"file{i}", b"") for i in range(5000))])),
        "zip_bomb": ("ratio or size", _zip([(CONFIG, files[CONFIG]), (WEIGHTS, b"\0" * (64 << 20))])),
        "zip_symlink": ("link", _zip_with_link(files)),
        "zip_truncated": ("zip", _zip(good)[:-40]),
    }


def _zip(entries: list[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return buffer.getvalue()


def _zip_with_link(files: Files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(CONFIG, files[CONFIG])
        link = zipfile.ZipInfo(WEIGHTS)
        link.create_system = 3  # Unix, so that the mode below counts
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    return buffer.getvalue()
