"""From an uploaded zip to a flat folder of allowed files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLimits:
    max_entries: int = 1_000
    max_file_bytes: int = 4 << 30
    max_total_bytes: int = 8 << 30
    max_ratio: int = 200  # decompressed / compressed, for entries above 1 MiB


def unpack_zip(path: Path, target_dir: Path, limits: ArchiveLimits) -> list[str]:
    """Write the allowed files of the zip at `path` flat into `target_dir`; return warnings.

    Raises:
        AdapterRefusedError: with every reason that was found; `target_dir` may then hold some files.
    """
    raise NotImplementedError
