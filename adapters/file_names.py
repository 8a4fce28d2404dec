"""Which file names an upload may hold, and what becomes of each."""

from __future__ import annotations

import re
from typing import Final

from loraplex.adapters.errors import Reason
from loraplex.adapters.refusals import shown

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
INDEX_FILE: Final = "adapter_model.safetensors.index.json"

# Looked at when an upload is checked (new tokens would have no rows in the base), never stored.
INSPECTED_FILES: Final = frozenset({"added_tokens.json", "tokenizer.json"})

_SHARD_PATTERN: Final = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_HARMLESS_FILES: Final = frozenset({"README.md", ".gitattributes", ".DS_Store"})
_PICKLE_SUFFIXES: Final = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_CODE_SUFFIXES: Final = (".py", ".pyc", ".so", ".dll", ".dylib", ".sh", ".exe")
_TAR_SUFFIXES: Final = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")


def is_shard_file(name: str) -> bool:
    return _SHARD_PATTERN.fullmatch(name) is not None


def is_version_file(name: str) -> bool:
    """Part of the version: stored and hashed (adapter_config.json, weights, index)."""
    return name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE) or is_shard_file(name)


def is_inspected_file(name: str) -> bool:
    """Needed by `inspect_adapter` beside the version's files; never stored."""
    return name in INSPECTED_FILES


def dropped_file_warning(name: str) -> str | None:
    """What the uploader is told of an allowed file that is not part of the version; None when not worth a word."""
    if is_version_file(name) or name in _HARMLESS_FILES:
        return None
    return f"{shown(name)} is not part of the adapter and was left out"


def check_file_name(name: str) -> Reason | None:
    """Why a file of this (plain) name refuses the whole upload: unsafe path, pickle, code or tar; else None."""
    return check_path(name, allow_folders=False) or _check_suffix(name)


def check_path(name: str, *, allow_folders: bool) -> Reason | None:
    """Why a path is unsafe (absolute, `..`, backslash, drive, NUL, empty part), or None."""
    parts = name.split("/")
    is_unsafe = (
        any(part in ("", ".", "..") for part in parts)
        or (len(parts) > 1 and not allow_folders)
        or len(name) > 1_024
        or any(char == "\\" or ord(char) < 32 for char in name)
        or re.match(r"[A-Za-z]:", name) is not None
    )
    if not is_unsafe:
        return None
    return Reason(
        code="unsafe_path",
        message=f"the file name {shown(name)} is an unsafe path",
        file=name,
        remedy="use plain file names such as adapter_config.json",
    )


def _check_suffix(name: str) -> Reason | None:
    lowered = name.lower()
    if lowered.endswith(_PICKLE_SUFFIXES):
        return Reason(
            code="pickle_refused",
            message=f"{shown(name)} is a pickle, which can run code; it was not opened",
            file=name,
            remedy="save the weights as safetensors: model.save_pretrained(folder, safe_serialization=True), "
            "and upload only adapter_config.json and adapter_model.safetensors",
        )
    if lowered.endswith(_CODE_SUFFIXES):
        return Reason(
            code="code_refused",
            message=f"{shown(name)} is code, which no adapter needs",
            file=name,
            remedy="upload only adapter_config.json and adapter_model.safetensors",
        )
    if lowered.endswith(_TAR_SUFFIXES):
        return tar_refusal(name)
    return None


def tar_refusal(name: str) -> Reason:
    return Reason(
        code="archive_format",
        message=f"{shown(name)} is a tar archive; links and devices in it make it unsafe to unpack",
        file=name,
        remedy="upload the files themselves, or one zip of them",
    )
