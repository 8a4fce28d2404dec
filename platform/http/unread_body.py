"""Ends a connection whose request was answered before its body was read, in a way that the client can hear.

Left alone, the server would go on reading an endless body for nothing; closed at once, unread bytes reset the
connection, and a client that writes its whole body before it reads may lose the reply. So the reply goes out first,
then a bounded part of the body is thrown away, then the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LINGER_S = 1.0
ENDLESS_BODY_BYTES = 256 * 1024  # read of a body that cannot be read to its end
DECLARED_BODY_BYTES = 8 * 1024 * 1024  # a body declared no longer than this is read to its end
SMALL_BODY_BYTES = 64 * 1024  # the server skips these by itself and keeps the connection


class UnreadBodyMiddleware:
    """Goes around everything that may answer early: authentication, caps, scopes, refused uploads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = _declared_length(scope) if scope["type"] == "http" else 0
        if length is not None and length <= SMALL_BODY_BYTES:
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(receive, send, length)
        await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """One request with a body that may be large, and its reply."""

    def __init__(self, receive: Receive, send: Send, length: int | None) -> None:
        self._receive = receive
        self._send = send
        is_short = length is not None and length <= DECLARED_BODY_BYTES
        self._most_discarded = DECLARED_BODY_BYTES if is_short else ENDLESS_BODY_BYTES
        self._is_read = False
        self._is_closing = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_read |= message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._is_read:
            self._is_closing = True
            MutableHeaders(scope=message)["connection"] = "close"
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not (self._is_closing and is_last):
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        await self._discard()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self) -> None:
        num_discarded = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while not self._is_read and num_discarded < self._most_discarded:
                    num_discarded += len((await self.receive()).get("body", b""))


def _declared_length(scope: Scope) -> int | None:
    """Of the body in bytes; None if only its end tells."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isascii() or not length.isdigit():
        return None
    return int(length)
