"""The ASGI application: layers, routes and error shape around the services that `platform.startup` has opened."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI

from loraplex.platform import engine_admin, health
from loraplex.platform.adapters import endpoints as adapters
from loraplex.platform.api_keys import endpoints as api_keys
from loraplex.platform.draining import DrainingMiddleware
from loraplex.platform.errors import install_error_handlers
from loraplex.platform.http.layers import install_layers
from loraplex.platform.http.turns import TurnsMiddleware
from loraplex.platform.openai import router as openai
from loraplex.platform.services import Services
from loraplex.platform.telemetry.layer import ErrorCountMiddleware
from loraplex.platform.tenants import endpoints as tenants


def create_app(services: Services) -> FastAPI:
    """The application of one server process. Opening and closing the services is the caller's."""
    # no redirects: behind a proxy they would name this host and its scheme, and a client would send its key there
    app = FastAPI(title="LoRAplex", version=version("loraplex"), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.services = services
    app.add_middleware(TurnsMiddleware)
    app.add_middleware(DrainingMiddleware, services=services)  # who calls is settled first
    install_layers(app, cors_origins=services.settings.cors_origin)
    app.add_middleware(ErrorCountMiddleware, metrics=services.metrics)
    install_error_handlers(app)
    for module in (health, engine_admin, tenants, api_keys, adapters):
        app.include_router(module.router)
    for prefix in ("/v1", "/tenants/{tenant}/v1"):
        app.include_router(openai.router, prefix=prefix)
    return app
