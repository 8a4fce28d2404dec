"""Finds stop strings in a text that grows piece by piece, and lets nothing of them out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that is complete. `text` is what may still be shown before it."""

    stop: str
    text: str


class StopStrings:
    """Holds back the longest end of the text that may still grow into a stop string.

    The stop that completes first wins, and of those the longest, so that the answer does not depend on how the
    text was cut into tokens.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Take text that is known to complete no stop; return what can be shown now."""
        if not self._stops:
            return text
        text = self._held + text
        num_held = max((_num_open(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def find(self, text: str) -> StopMatch | None:
        """The first stop that `text`, said after all that was pushed, completes. Changes nothing."""
        if not self._stops:
            return None
        num_held = len(self._held)
        text = self._held + text
        spans = (_first_span(text, stop, num_held) for stop in self._stops)
        found = min((span for span in spans if span), default=None, key=lambda span: (span[1], span[0]))
        return found and StopMatch(text[found[0] : found[1]], text[: found[0]])

    def flush(self) -> str:
        """The text ended without a stop: give back what was held."""
        held, self._held = self._held, ""
        return held


def _num_open(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, and does not end with."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _first_span(text: str, stop: str, after: int) -> tuple[int, int] | None:
    """Start and end of the first `stop` in `text` that ends beyond `after`."""
    start = text.find(stop, max(0, after - len(stop) + 1))
    return None if start < 0 else (start, start + len(stop))
