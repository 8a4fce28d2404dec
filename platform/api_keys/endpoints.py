"""Keys of a tenant, and platform keys."""

from __future__ import annotations

from fastapi import APIRouter

from loraplex.platform.api_keys.principal import Scope, TenantContext
from loraplex.platform.api_keys.schemas import CreatedKeyView, CreateKey, KeyView
from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.deps import CurrentPrincipal, PathTenant, ServicesDep, require_scope
from loraplex.platform.http.json_body import JsonRoute
from loraplex.platform.paging import After, Limit, Page, cut

router = APIRouter(route_class=JsonRoute, prefix="/api/v1", tags=["keys"])


@router.post("/tenants/{tenant}/keys", status_code=201, dependencies=[require_scope(Scope.TENANT_ADMIN)])
async def create_tenant_key(
    body: CreateKey, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> CreatedKeyView:
    created = await services.api_keys.create(
        name=body.name, scopes=body.scopes, tenant=tenant, granted_by=principal, expires_at=body.expires_at
    )
    return CreatedKeyView.of_created(created)


@router.get("/tenants/{tenant}/keys", dependencies=[require_scope(Scope.TENANT_ADMIN)])
async def list_tenant_keys(
    tenant: PathTenant, services: ServicesDep, after: After = None, limit: Limit = 100
) -> Page[KeyView]:
    return await _list(services.api_keys, tenant, after=after, limit=limit)


@router.delete("/tenants/{tenant}/keys/{key}", status_code=204, dependencies=[require_scope(Scope.TENANT_ADMIN)])
async def revoke_tenant_key(key: str, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep) -> None:
    await services.api_keys.revoke(key, tenant, actor=principal.key_id)


@router.post("/keys", status_code=201, dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def create_platform_key(body: CreateKey, principal: CurrentPrincipal, services: ServicesDep) -> CreatedKeyView:
    created = await services.api_keys.create(
        name=body.name, scopes=body.scopes, tenant=None, granted_by=principal, expires_at=body.expires_at
    )
    return CreatedKeyView.of_created(created)


@router.get("/keys", dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def list_platform_keys(services: ServicesDep, after: After = None, limit: Limit = 100) -> Page[KeyView]:
    return await _list(services.api_keys, None, after=after, limit=limit)


@router.delete("/keys/{key}", status_code=204, dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def revoke_platform_key(key: str, principal: CurrentPrincipal, services: ServicesDep) -> None:
    await services.api_keys.revoke(key, None, actor=principal.key_id)


async def _list(
    api_keys: ApiKeyService, tenant: TenantContext | None, *, after: str | None, limit: int
) -> Page[KeyView]:
    keys, has_more = cut(await api_keys.list(tenant, after=after, limit=limit + 1), limit)
    return Page(data=[KeyView.of(key) for key in keys], has_more=has_more)
