"""Lets requests that come at once take turns, so that the event loop is free for others between them."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Receive, Scope, Send

NUM_AT_ONCE = 4  # reading, checking and tokenizing one takes some milliseconds, and nothing else happens meanwhile


class TurnsMiddleware:
    """Of many requests that are ready in the same turn of the event loop, few go on in it, the others in later ones.

    Nothing is held back for longer than those before it need for their turn. Probes (no body, no key) take no turn.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._turns = asyncio.Semaphore(NUM_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            async with self._turns:
                await asyncio.sleep(0)
        await self._app(scope, receive, send)
