"""Content addresses: of one file, of a version, of the version that a folder holds."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from loraplex.adapters.folder import adapter_root, open_regular, version_files
from loraplex.adapters.turns import PIECE_BYTES, Piece, unpaced


def hash_file(path: Path, piece: Piece = unpaced) -> str:
    """sha256 (hex) of a regular file; links are not followed.

    Raises:
        AdapterRefusedError: the path is a link or not a regular file.
        OSError: it cannot be read.
    """
    hasher = hashlib.sha256()
    with open_regular(path) as file:
        while chunk := file.read(PIECE_BYTES):
            with piece():
                hasher.update(chunk)
    return hasher.hexdigest()


def version_digest(files: Mapping[str, str]) -> str:
    """sha256 (hex) over the sorted (file name, sha256 hex) list of a version's files.

    Each field is preceded by its length, so that no two lists share an encoding.
    """
    hasher = hashlib.sha256()
    for name in sorted(files):
        for field in (name.encode(), bytes.fromhex(files[name])):
            hasher.update(len(field).to_bytes(8, "big"))
            hasher.update(field)
    return hasher.hexdigest()


def folder_digest(folder: Path, piece: Piece = unpaced) -> str:
    """`version_digest` of the files that make a version in `folder` (see `version_files`)."""
    root = adapter_root(folder)
    return version_digest({name: hash_file(root / name, piece) for name in version_files(root)})
