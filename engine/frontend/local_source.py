"""An AdapterSource over PEFT folders of this machine, for offline use."""

from __future__ import annotations

from pathlib import Path

from loraplex.adapters.digest import folder_digest
from loraplex.adapters.errors import AdapterLoadError, LoraplexError
from loraplex.adapters.turns import Piece, unpaced


class LocalAdapterSource:
    """Knows folders by the digest that they had when they were added."""

    def __init__(self) -> None:
        self._folders: dict[str, Path] = {}

    def add(self, folder: Path) -> str:
        """Make the adapter in `folder` fetchable; return its digest."""
        digest = folder_digest(folder)
        self._folders[digest] = folder
        return digest

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        """See AdapterSource.fetch."""
        folder = self._folders.get(digest)
        if folder is None:
            raise AdapterLoadError(f"no folder with the adapter {digest[:12]} was given")
        try:
            found = folder_digest(folder, piece)
        except (OSError, LoraplexError) as error:
            raise AdapterLoadError(f"the adapter folder {folder} cannot be read any more: {error}") from error
        if found != digest:
            raise AdapterLoadError(f"the files in {folder} were changed after the adapter was given to the engine")
        return folder


def create_local_source(folders: list[str]) -> LocalAdapterSource:
    """Factory for a SourceSpec: the adapters in `folders`."""
    source = LocalAdapterSource()
    for folder in folders:
        source.add(Path(folder))
    return source
