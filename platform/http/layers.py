"""The ASGI layers around the routes, in their order."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from loraplex.platform.http.authentication import AuthenticationMiddleware
from loraplex.platform.http.body_limit import BodyLimitMiddleware
from loraplex.platform.http.request_id import CLIENT_REQUEST_ID_HEADER, REQUEST_ID_HEADER, RequestIdMiddleware
from loraplex.platform.http.unread_body import UnreadBodyMiddleware


def install_layers(app: FastAPI, *, cors_origins: tuple[str, ...] = ()) -> None:
    """Outermost first: unread bodies, request id, CORS (a preflight carries no key), authentication, body cap."""
    app.add_middleware(BodyLimitMiddleware)  # each layer goes around those added before
    app.add_middleware(AuthenticationMiddleware)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, CLIENT_REQUEST_ID_HEADER, "retry-after"],
        )
    app.add_middleware(RequestIdMiddleware)
    app.add_middleware(UnreadBodyMiddleware)
