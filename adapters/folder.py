"""The files of one adapter on this machine. Links are never followed."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from loraplex.adapters.errors import AdapterRefusedError
from loraplex.adapters.file_names import CONFIG_FILE, is_version_file
from loraplex.adapters.refusals import refused, shown


def adapter_root(folder: Path) -> Path:
    """`folder`, or the one folder directly in it that holds adapter_config.json (PEFT writes named adapters so)."""
    if (folder / CONFIG_FILE).exists() or not folder.is_dir():
        return folder
    nested = [child for child in folder.iterdir() if child.is_dir() and (child / CONFIG_FILE).exists()]
    return nested[0] if len(nested) == 1 else folder


def version_files(folder: Path) -> tuple[str, ...]:
    """The sorted names of the files in `folder` that make a version; the others are never stored."""
    return tuple(sorted(name for name in os.listdir(folder) if is_version_file(name)))


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        AdapterRefusedError: it is a link, a device, a pipe or a folder.
        OSError: it does not exist or cannot be read.
    """
    try:
        # O_NONBLOCK: opening a pipe must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _not_regular(path, "a symbolic link") from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path, "not a regular file")
    return os.fdopen(descriptor, "rb")


def _not_regular(path: Path, what: str) -> AdapterRefusedError:
    message = f"{shown(path.name)} is {what}; links are refused and never followed"
    return refused("not_a_regular_file", message, file=path.name, remedy="put the file itself in its place")
