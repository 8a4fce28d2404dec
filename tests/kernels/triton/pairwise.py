"""A small set of cases in which every two values of different axes meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

Case = tuple[object, ...]


def pairwise(*axes: Sequence[object], at_most: int = 60) -> list[Case]:
    """Greedy, and the same every time."""
    candidates = list(product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(_pairs, candidates))
    chosen: list[Case] = []
    while missing:
        best = max(candidates, key=lambda candidate: len(_pairs(candidate) & missing))
        missing -= _pairs(best)
        chosen.append(tuple(axis[index] for axis, index in zip(axes, best, strict=True)))
    assert len(chosen) <= at_most
    return chosen


def _pairs(indices: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(enumerate(indices), 2))
