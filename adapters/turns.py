"""Loads and steps take turns, so that a load holds up a step by pieces of known size and by nothing else.

Side by side they would compete for the cores and for the interpreter's lock: a step needs all cores until each of its
barriers, and it asks for the lock again many times, each time behind whatever Python a loader thread is in.

    step thread    | step      |give| step      |give| step      |  nothing to compute, waiting for loads
    loader thread                [p]              [p]               [p][p][p][p][p] ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition

PIECE_BYTES = 1 << 20  # how much a piece hashes, checks or converts at most

# Enters a piece of a load: at most PIECE_BYTES, or a few milliseconds of Python, and no waiting for disk or network.
Piece = Callable[[], AbstractContextManager[None]]


def unpaced() -> AbstractContextManager[None]:
    """A `Piece` for processes in which no steps are made."""
    return nullcontext()


class Turns:
    """`step` is for the step thread, `piece` for loader threads, of which one at a time works on a piece.

    Loads get `share` of the time that steps take, and all of it while there is no step.
    """

    def __init__(self, *, share: float = 0.1) -> None:
        self._share = share
        self._changed = Condition()
        self._is_step = False
        self._is_piece = False
        self._num_waiting = 0  # loader threads that could go on
        self._step_s = 0.0  # of the last step

    @property
    def budget_s(self) -> float:
        """Seconds that a load may take of the step thread's own time before the next step."""
        return self._share * self._step_s

    @contextmanager
    def step(self) -> Iterator[None]:
        """No piece is worked on while the block runs. If a load could go on, it first gets its share."""
        self._give_share()
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._changed:
                self._step_s = time.perf_counter() - started
                self._is_step = False
                self._changed.notify_all()

    @contextmanager
    def piece(self) -> Iterator[None]:
        with self._changed:
            self._num_waiting += 1
            self._changed.wait_for(lambda: not self._is_step and not self._is_piece)
            self._num_waiting -= 1
            self._is_piece = True
        try:
            yield
        finally:
            with self._changed:
                self._is_piece = False
                self._changed.notify_all()

    def _give_share(self) -> None:
        deadline = time.perf_counter() + self.budget_s
        with self._changed:
            if self._num_waiting:
                while (left := deadline - time.perf_counter()) > 0:
                    self._changed.wait(left)
            self._is_step = True
            self._changed.wait_for(lambda: not self._is_piece)
