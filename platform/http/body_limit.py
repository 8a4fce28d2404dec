"""Caps JSON bodies. Uploads of adapters count their own bytes while they stream."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.errors import PayloadTooLargeError
from loraplex.platform.http.refusal import refuse

MAX_BODY_BYTES = 8 * 1024 * 1024

_UPLOAD = re.compile(r"/api/v1/tenants/[^/]+/adapters/[^/]+/versions")


class BodyLimitMiddleware:
    """413 at once for a declared length above the cap, or as soon as a body of unknown length passes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_upload(scope):
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "0")
        if declared.isascii() and declared.isdigit() and int(declared) > MAX_BODY_BYTES:
            await refuse(scope, receive, send, _too_large())
            return
        body = _CappedBody(receive, send)
        try:
            await self._app(scope, body.receive, body.send)
        except PayloadTooLargeError:
            if not body.is_refusable:
                raise
        if body.is_refusable:
            await refuse(scope, receive, send, _too_large())


class _CappedBody:
    """Counts what is received. Past the cap the application is told so, and what it then answers is dropped.

    (A framework turns an exception out of `receive` into a reply of its own, which would name the wrong fault.)
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._num_received = 0
        self._is_too_large = False
        self._has_started = False

    @property
    def is_refusable(self) -> bool:
        return self._is_too_large and not self._has_started

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_received += len(message.get("body", b""))
        if self._num_received > MAX_BODY_BYTES:
            self._is_too_large = True
            raise _too_large()
        return message

    async def send(self, message: Message) -> None:
        if self.is_refusable:
            return
        self._has_started = True
        await self._send(message)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] == "POST" and _UPLOAD.fullmatch(scope["path"]) is not None


def _too_large() -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the body is longer than {MAX_BODY_BYTES} bytes, the most that this route takes")
