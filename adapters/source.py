"""Where the engine finds a version's files. The platform implements this; the engine knows no store and no SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class AdapterSource(Protocol):
    """Brings a version's files to this machine."""

    def fetch(self, digest: str) -> Path:
        """Return a folder with exactly the version's files, each checked against its sha256.

        Blocking; called from loader threads only, never on the engine's step thread.

        Raises:
            AdapterLoadError: a file is missing, altered, or the store cannot be reached.
        """
        ...
