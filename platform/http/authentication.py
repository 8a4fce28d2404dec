"""Who is calling, and in which tenant: settled from the request's head, before a byte of its body is read."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from loraplex.adapters.errors import InvalidRequestError, LoraplexError
from loraplex.platform.api_keys.principal import Principal, TenantContext
from loraplex.platform.api_keys.principal import Scope as KeyScope
from loraplex.platform.errors import AuthenticationError
from loraplex.platform.http.refusal import refuse
from loraplex.platform.services import Services
from loraplex.platform.tenants.context import no_such_tenant

OPEN_PATHS = frozenset({"/livez", "/readyz", "/openapi.json", "/admin"})
OPEN_PREFIX = "/admin/"  # static files of the user interface
METRICS_PATH = "/metrics"

_TENANT_PATH = re.compile(r"(?:/api/v1)?/tenants/(?P<tenant>[^/]+)(?P<rest>/.*)?", re.DOTALL)


class AuthenticationMiddleware:
    """Sets `state["principal"]` and `state["tenant"]`, or answers 4xx in the error shape.

    Expects `app.state.services`. While a request runs in a tenant it is counted, so that deleting the tenant can wait.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        services: Services = scope["app"].state.services
        try:
            principal = await _authenticate(scope, services)
            tenant = None if principal is None else await _tenant_of(principal, scope["path"], services)
            if tenant is not None:
                services.tenants.in_flight.enter(tenant.id)
        except LoraplexError as error:
            await refuse(scope, receive, send, error)
            return
        scope["state"] = {**scope.get("state", {}), "principal": principal, "tenant": tenant}
        try:
            await self._app(scope, receive, send)
        finally:
            if tenant is not None:
                services.tenants.in_flight.leave(tenant.id)


async def _authenticate(scope: Scope, services: Services) -> Principal | None:
    """None for what needs no key."""
    path: str = scope["path"]
    is_metrics = path == METRICS_PATH
    if path in OPEN_PATHS or path.startswith(OPEN_PREFIX) or (is_metrics and services.settings.metrics_public):
        return None
    principal = await services.api_keys.authenticate(_bearer_key(Headers(scope=scope)))
    if is_metrics:
        principal.require(KeyScope.METRICS_READ)
    return principal


def _bearer_key(headers: Headers) -> str:
    given = headers.getlist("authorization")
    if not given:
        raise AuthenticationError("no API key was given; send the header `Authorization: Bearer KEY`")
    scheme, _, key = given[0].partition(" ")
    if len(given) > 1 or scheme.lower() != "bearer" or not key.strip():
        raise AuthenticationError("the Authorization header must be given once, as `Bearer KEY`")
    return key.strip()


async def _tenant_of(principal: Principal, path: str, services: Services) -> TenantContext | None:
    """The tenant that the request runs in; None on platform routes.

    For a tenant's key every other tenant's path is 404, whether or not it exists. A tenant itself (no rest of the
    path) is its endpoint's business: it may be half deleted.
    """
    match = _TENANT_PATH.fullmatch(path)
    if principal.tenant is not None:
        if match is not None and match["tenant"] not in (principal.tenant.name, principal.tenant.id):
            raise no_such_tenant()
        return principal.tenant
    if match is not None:
        return await services.tenants.context(match["tenant"]) if match["rest"] else None
    if path == "/v1" or path.startswith("/v1/"):
        raise InvalidRequestError(
            f"this is a platform key, which belongs to no tenant: use /tenants/{{tenant}}{path}", param="tenant"
        )
    return None
