"""Requests that come at once do not keep the event loop from everybody else."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import Message, Receive, Scope, Send

from loraplex.platform.http.turns import NUM_AT_ONCE, TurnsMiddleware


async def nothing() -> Message:
    raise AssertionError("nobody reads")


async def unsent(message: Message) -> None:
    raise AssertionError("nobody answers")


async def test_few_requests_go_on_in_one_turn_of_the_event_loop() -> None:
    turn = 0
    begun: Counter[int] = Counter()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun[turn] += 1
        await asyncio.sleep(0.01)  # what takes long holds nobody up

    layer = TurnsMiddleware(app)
    requests = [asyncio.create_task(layer({"type": "http", "method": "POST"}, nothing, unsent)) for _ in range(100)]
    while sum(begun.values()) < len(requests):
        await asyncio.sleep(0)
        turn += 1
    await asyncio.gather(*requests)
    assert max(begun.values()) <= NUM_AT_ONCE


async def test_a_probe_takes_no_turn() -> None:
    layer = TurnsMiddleware(lambda *_: asyncio.sleep(0))
    others = [asyncio.create_task(layer({"type": "http", "method": "POST"}, nothing, unsent)) for _ in range(100)]
    await asyncio.sleep(0)
    await layer({"type": "http", "method": "GET"}, nothing, unsent)
    assert not all(other.done() for other in others)
    await asyncio.gather(*others)
