"""The folder of everything that an installation keeps on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from loraplex.engine.errors import ConfigurationError


def make_data_folder(folder: Path) -> None:
    """Make it, for this user alone, if it is not there. Raises ConfigurationError when it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror
    if reason is not None:
        raise ConfigurationError(f"cannot write to the data folder {folder}: {reason}; give another", param="data_dir")
