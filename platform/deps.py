"""What endpoints ask for. Authentication and the tenant of the path were settled by the ASGI layer, before the body.

All of them are coroutines although none waits: the framework runs a plain function on a thread, for every request.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from loraplex.platform.api_keys.principal import Principal, Scope, TenantContext
from loraplex.platform.errors import AuthenticationError, NotFoundError
from loraplex.platform.services import Services


async def get_services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


ServicesDep = Annotated[Services, Depends(get_services)]


async def get_principal(request: Request) -> Principal:
    principal: Principal | None = getattr(request.state, "principal", None)
    if principal is None:
        raise AuthenticationError("this route needs a key: send `Authorization: Bearer KEY`")
    return principal


CurrentPrincipal = Annotated[Principal, Depends(get_principal)]


async def get_tenant(request: Request) -> TenantContext:
    tenant: TenantContext | None = getattr(request.state, "tenant", None)
    if tenant is None:
        raise NotFoundError("no such tenant", param="tenant")
    return tenant


RequestTenant = Annotated[TenantContext, Depends(get_tenant)]
"""The one tenant that this request runs in: of the key (`/v1/*`) or of the path."""

PathTenant = RequestTenant
"""The same, for routes with `{tenant}` in their path: another tenant's and an unknown one are 404 alike."""


async def get_request_id(request: Request) -> str:
    request_id: str = request.state.request_id
    return request_id


RequestId = Annotated[str, Depends(get_request_id)]
"""The server's own random id of this request, as in the reply's `x-request-id`."""


def require_scope(scope: Scope) -> Any:
    """A route dependency: `dependencies=[require_scope(Scope.INFER)]`. 403 naming the scope that is missing."""

    async def check(principal: CurrentPrincipal) -> None:
        principal.require(scope)

    check.scope = scope  # type: ignore[attr-defined]  # read by the test that walks every route
    return Depends(check)
