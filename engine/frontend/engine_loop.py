"""The loop around EngineCore.step, the same in its own process and in a thread of this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.messages import EngineCall, EngineEvent, OutputBatch

STATS_INTERVAL_S = 0.1
STALLED_POLL_MS = 2  # nothing to compute, only adapter loads are awaited


class EngineLoop:
    """Takes the calls that are there -> one step -> sends what came of it.

    `receive(timeout_ms)` returns waiting calls (None waits for one, 0 does not wait), or None itself when the loop
    is to end. An exception of a step passes through.
    """

    def __init__(
        self,
        core: EngineCore,
        *,
        receive: Callable[[int | None], Sequence[EngineCall] | None],
        send: Callable[[EngineEvent], None],
    ) -> None:
        self._core = core
        self._receive = receive
        self._send = send
        self._stats_sent_at = 0.0

    def run(self) -> None:
        while (calls := self._receive(self._patience_ms())) is not None:
            for call in calls:
                self._core.handle(call)
            self._step()

    def _step(self) -> None:
        if self._core.has_work and (outputs := self._core.step()):
            self._send(OutputBatch(outputs))
        for reply in self._core.take_replies():
            self._send(reply)
        self._send_stats()

    def _patience_ms(self) -> int | None:
        if not self._core.has_work:
            return None
        return STALLED_POLL_MS if self._core.is_stalled else 0

    def _send_stats(self) -> None:
        """At most every 100 ms, but always before the engine falls idle: idle gauges would be stale ones."""
        now = time.monotonic()
        if not self._core.has_work or now - self._stats_sent_at >= STATS_INTERVAL_S:
            self._stats_sent_at = now
            self._send(self._core.stats())
