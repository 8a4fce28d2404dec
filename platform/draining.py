"""Counts the work, and turns new work away while the server shuts down. Probes, metrics and cancelling go on."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.platform.errors import ServiceUnavailableError
from loraplex.platform.http.refusal import refuse
from loraplex.platform.services import Services

_OPEN_PATHS = frozenset({"/livez", "/readyz", "/metrics"})
_CANCEL_PATH = re.compile(r"(?:/tenants/[^/]+)?/v1/requests/[^/]+")


class DrainingMiddleware:
    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(scope["path"]):
            await self._app(scope, receive, send)
        elif self._services.is_draining:
            await refuse(scope, receive, send, ServiceUnavailableError("the server is shutting down; try another"))
        else:
            with self._services.in_progress.track():
                await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in _OPEN_PATHS or _CANCEL_PATH.fullmatch(path) is not None
