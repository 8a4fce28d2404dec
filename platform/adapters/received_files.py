"""What an upload brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex.platform.storage.manifest import StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedFiles:
    """Files on disk, checked by name only, and what the uploader should know of those that were left out."""

    files: Mapping[str, StoredFile]
    warnings: Sequence[str] = ()

    def only(self, names: Sequence[str]) -> ReceivedFiles:
        return ReceivedFiles(files={name: self.files[name] for name in names}, warnings=self.warnings)
