"""What a version consists of, as it lies in the store beside the files."""

from __future__ import annotations

import msgspec


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    size: int  # bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """File name -> content. It proves itself: the version's digest is computed from it."""

    files: dict[str, StoredFile]
