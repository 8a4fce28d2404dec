"""Replies that end when their client does: server-sent events, and waiting for a whole answer.

A client that closes its connection is noticed while the answer is still being made, so that its blocks and slots are
free by the next step; a client that does not read is cut off after SEND_TIMEOUT_S.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.openai.failure import failure_body, failure_response
from loraplex.platform.openai.responses import Envelope
from loraplex.platform.telemetry.metrics import Metrics

SEND_TIMEOUT_S = 30.0
# A refusal that comes this early still gets its own status; after that the headers go out.
FIRST_EVENT_WAIT_S = 0.5

DONE = b"data: [DONE]\n\n"

HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed its connection before the answer was complete, or stopped reading. Nobody is left to tell."""


def encode_event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, but cancel it as soon as the client is gone. The body must have been read.

    Raises:
        ClientGoneError: the client closed the connection first.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client closed its connection")
        return task.result()
    finally:
        await _cancel(task, watcher)


class EventStreamResponse(Response):
    """Sends `events` one by one, and closes the generator whatever happens.

    An error before the headers are out gets its own status; afterwards it is the last event, and no [DONE] follows.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, envelope: Envelope, metrics: Metrics) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(HEADERS)
        self._events = events
        self._envelope = envelope
        self._metrics = metrics
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientGoneError as error:
            logger.info("%s ended early: %s", self._envelope.id, error)
        except LoraplexError as error:
            await failure_response(error, self._envelope)(scope, receive, send)

    async def _send_all(self, send: Send) -> None:
        """Raises what goes wrong before the headers are out."""
        async with aclosing(self._events) as events:
            try:
                await self._send_events(events, send)
            except ClientGoneError:
                raise
            except Exception as error:  # the edge: the client is told, whatever it was
                if not self._has_started:
                    raise
                await _send(send, _body(self._last_event(error)))
        await _send(send, _body(b"", more=False))

    async def _send_events(self, events: AsyncGenerator[bytes, None], send: Send) -> None:
        first = asyncio.create_task(_next(events))
        try:
            await asyncio.wait((first,), timeout=FIRST_EVENT_WAIT_S)
            if first.done():
                first.result()
            await self._start(send)
            event = await first
        finally:
            await _cancel(first)
        while event is not None:
            await _send(send, _body(event))
            event = await _next(events)

    async def _start(self, send: Send) -> None:
        self._has_started = True
        await _send(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})

    def _last_event(self, error: Exception) -> bytes:
        body = failure_body(error, self._envelope)
        self._metrics.errors.labels("event", body["error"]["code"]).inc()
        return encode_event(body)


async def _send(send: Send, message: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send(message)
    except TimeoutError:
        raise ClientGoneError(f"the client did not read for {SEND_TIMEOUT_S:g} s") from None


def _body(content: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _next(events: AsyncGenerator[bytes, None]) -> bytes | None:
    return await anext(events, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
