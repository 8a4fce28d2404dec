"""A new adapter arrives while others decode: how long does any of them wait for its next token?

Arrivals are of three kinds: an adapter is loaded and not yet used; a request comes whose adapter has to be loaded
first; and, to tell what a prompt alone costs the others, a request on the base comes.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.request_set import BenchRequest, single_stream_set
from benchmarks.runners.stream_client import stream_body, stream_events

NUM_STREAMS = 4
STEADY_S = 5.0
SETTLE_S = 0.7  # after the new adapter's answer, which may have delayed others
TOKENS_BEFORE_STEADY = 8
ENDLESS_TOKENS = 3000  # more than a stream gets to
NEW_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class GapsBetweenTokens:
    """Seconds, of all streams together: all of a time without arrivals, and the largest at each arrival."""

    steady: list[float]
    load: list[float]
    cold_request: list[float]
    base_request: list[float]

    @property
    def steady_p99(self) -> float:
        return statistics.quantiles(self.steady, n=100)[98]


class _Streams:
    """Decodes on the base; knows when each token came."""

    def __init__(self, port: int, key: str) -> None:
        self._arrivals: list[list[float]] = [[] for _ in range(NUM_STREAMS)]
        self._tasks = [
            asyncio.create_task(_listen(port, key, request, {"model": "base"}, arrivals))
            for request, arrivals in zip(_requests(NUM_STREAMS, ENDLESS_TOKENS), self._arrivals, strict=True)
        ]

    async def wait_for_tokens(self, count: int) -> None:
        while min(map(len, self._arrivals)) < count:
            await asyncio.sleep(0.01)

    def gaps_since(self, moment: float) -> list[float]:
        """Those that were open at `moment` or later; all streams must still decode."""
        if any(task.done() for task in self._tasks):
            raise RuntimeError("a stream ended before the measurement did")
        return [after - before for times in self._arrivals for before, after in pairwise(times) if after > moment]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def measure_gaps(
    port: int, key: str, *, to_load: list[str], to_ask: list[str], load: Callable[[str], object]
) -> GapsBetweenTokens:
    """None of the adapters is resident before; `load` makes one so, and blocks until it is."""
    streams = _Streams(port, key)
    prompts = iter(_requests(2 * len(to_ask), NEW_TOKENS))

    def ask(lora: str | None) -> Coroutine[Any, Any, None]:
        return _listen(port, key, next(prompts), {"model": "base", "lora": lora}, [])

    try:
        await streams.wait_for_tokens(TOKENS_BEFORE_STEADY)
        started = time.perf_counter()
        await asyncio.sleep(STEADY_S)
        return GapsBetweenTokens(
            steady=streams.gaps_since(started),
            load=[await _largest_gap(streams, asyncio.to_thread(load, name)) for name in to_load],
            cold_request=[await _largest_gap(streams, ask(name)) for name in to_ask],
            base_request=[await _largest_gap(streams, ask(None)) for _ in to_ask],
        )
    finally:
        await streams.close()


async def _largest_gap(streams: _Streams, arrival: Coroutine[Any, Any, object]) -> float:
    started = time.perf_counter()
    await arrival
    await asyncio.sleep(SETTLE_S)
    return max(streams.gaps_since(started))


async def _listen(port: int, key: str, request: BenchRequest, extra: dict[str, Any], arrivals: list[float]) -> None:
    async for event in stream_events(port, stream_body(request) | extra | {"return_token_ids": True}, key):
        if event.get("choices"):
            arrivals.append(time.perf_counter())


def _requests(count: int, output_tokens: int) -> list[BenchRequest]:
    return [BenchRequest(each.prompt_token_ids, each.index, output_tokens) for each in single_stream_set(count)]
