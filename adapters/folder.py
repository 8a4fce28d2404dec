"""The files of one adapter on this machine. Links are never followed."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


def adapter_root(folder: Path) -> Path:
    """`folder`, or the one folder directly in it that holds adapter_config.json (PEFT writes named adapters so)."""
    raise NotImplementedError


def version_files(folder: Path) -> tuple[str, ...]:
    """The sorted names of the files in `folder` that make a version; the others are never stored."""
    raise NotImplementedError


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a link or anything else is refused (AdapterRefusedError)."""
    raise NotImplementedError
