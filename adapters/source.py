"""Where the engine finds a version's files. The platform implements this; the engine knows no store and no SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from loraplex.adapters.turns import Piece


class AdapterSource(Protocol):
    """Brings a version's files to this machine."""

    def fetch(self, digest: str, piece: Piece) -> Path:
        """Return a folder with exactly the version's files, each checked against its sha256.

        Blocking; called from loader threads only, never on the engine's step thread. What it computes, hashes above
        all, it computes within `piece()`.

        Raises:
            AdapterLoadError: a file is missing, altered, or the store cannot be reached.
        """
        ...
