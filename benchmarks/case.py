"""One figure of `make bench-cases`, in words, and the ratios that it gives to compare with a target."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    figure: str
    ratios: dict[str, float] = field(default_factory=dict)
