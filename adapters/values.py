"""Are all values of an adapter finite, also in float16? Torch-free, bounded memory."""

from __future__ import annotations

from pathlib import Path

from loraplex.adapters.errors import Reason


def check_values(folder: Path) -> list[Reason]:
    """One reason per tensor that holds NaN, infinity or a magnitude that float16 cannot."""
    raise NotImplementedError
