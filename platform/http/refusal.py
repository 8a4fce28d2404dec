"""Says no to a request whose body was not read, in a way that the client can hear.

Closing a socket with unread bytes resets the connection, and a client that writes its whole body before it reads may
lose the reply. So the reply goes out first, then a bounded part of the body is thrown away, then the connection is
closed.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.errors import error_response

LINGER_S = 1.0
ENDLESS_BODY_BYTES = 256 * 1024  # read of a body that cannot be read to its end
DECLARED_BODY_BYTES = 8 * 1024 * 1024  # a body declared no longer than this is read to its end
SMALL_BODY_BYTES = 64 * 1024  # the server skips these by itself and keeps the connection


async def refuse(scope: Scope, receive: Receive, send: Send, error: LoraplexError) -> None:
    """Send the error in its shape; close the connection afterwards if more than a small body may follow."""
    response = error_response(error, request_id=scope.get("state", {}).get("request_id"))
    length = _declared_length(scope)
    if length is not None and length <= SMALL_BODY_BYTES:
        await response(scope, receive, send)
        return
    response.headers["connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    is_short = length is not None and length <= DECLARED_BODY_BYTES
    await _discard(receive, at_most=DECLARED_BODY_BYTES if is_short else ENDLESS_BODY_BYTES)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _declared_length(scope: Scope) -> int | None:
    """Of the body in bytes; None if only its end tells."""
    headers = Headers(scope=scope)
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isascii() or not length.isdigit():
        return None
    return int(length)


async def _discard(receive: Receive, *, at_most: int) -> None:
    num_read = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while num_read < at_most:
                message = await receive()
                num_read += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
