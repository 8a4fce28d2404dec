"""How an ASGI layer says no: it answers in the error shape and never calls the application."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.errors import error_response


async def refuse(scope: Scope, receive: Receive, send: Send, error: LoraplexError) -> None:
    response = error_response(error, request_id=scope.get("state", {}).get("request_id"))
    await response(scope, receive, send)
