"""Gives every request an id that nobody else can choose or guess."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.ids import new_id

REQUEST_ID_HEADER = "x-request-id"
CLIENT_REQUEST_ID_HEADER = "x-client-request-id"

_ECHOED = re.compile(r"[\x20-\x7e]{1,128}")


class RequestIdMiddleware:
    """Puts a random id into `state["request_id"]` and the reply's `x-request-id`.

    A client's own `x-request-id` comes back as `x-client-request-id`, if it is at most 128 visible characters; it
    never finds or cancels anything.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_id("req")
        client_id = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        scope["state"] = {**scope.get("state", {}), "request_id": request_id}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                if _ECHOED.fullmatch(client_id):
                    headers[CLIENT_REQUEST_ID_HEADER] = client_id
            await send(message)

        await self._app(scope, receive, send_with_id)
