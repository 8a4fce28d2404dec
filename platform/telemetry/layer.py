"""Counts error replies where they leave the process, whichever layer made them."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.telemetry.metrics import Metrics


class ErrorCountMiddleware:
    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400 and not _is_probe(scope):
                self._metrics.errors.labels("reply", str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:  # the framework's outermost layer, around this one, makes it the reply
            self._metrics.errors.labels("reply", "500").inc()
            raise


def _is_probe(scope: Scope) -> bool:
    return scope["path"] in ("/livez", "/readyz")
