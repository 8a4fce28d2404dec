"""Says no to a request whose body was not read, in a way that the client can hear.

Closing a socket with unread bytes resets the connection, and the client may lose the reply that is already on its way.
So the reply goes out first, then a bounded part of the body is thrown away, then the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.errors import error_response

LINGER_S = 1.0
LINGER_BYTES = 256 * 1024
SMALL_BODY_BYTES = 64 * 1024  # the server skips these by itself and keeps the connection


async def refuse(scope: Scope, receive: Receive, send: Send, error: LoraplexError) -> None:
    """Send the error in its shape; close the connection afterwards if more than a small body may follow."""
    response = error_response(error, request_id=scope.get("state", {}).get("request_id"))
    if not _may_have_large_body(scope):
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await _discard(receive)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _may_have_large_body(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    if "transfer-encoding" in headers:
        return True
    length = headers.get("content-length", "0")
    return not length.isascii() or not length.isdigit() or int(length) > SMALL_BODY_BYTES


async def _discard(receive: Receive) -> None:
    num_read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_read < LINGER_BYTES:
                message = await receive()
                num_read += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
