"""Tenants. Their own administrators may look at them; making and removing them is the platform's."""

from __future__ import annotations

from fastapi import APIRouter

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.deps import CurrentPrincipal, ServicesDep, require_scope
from loraplex.platform.http.json_body import JsonRoute
from loraplex.platform.paging import After, Limit, Page, cut
from loraplex.platform.tenants.schemas import CreateTenant, TenantView

router = APIRouter(route_class=JsonRoute, prefix="/api/v1/tenants", tags=["tenants"])


@router.post("", status_code=201, dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def create_tenant(body: CreateTenant, principal: CurrentPrincipal, services: ServicesDep) -> TenantView:
    return TenantView.of(await services.tenants.create(body.name, actor=principal.key_id))


@router.get("", dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def list_tenants(services: ServicesDep, after: After = None, limit: Limit = 100) -> Page[TenantView]:
    tenants, has_more = cut(await services.tenants.list(after=after, limit=limit + 1), limit)
    return Page(data=[TenantView.of(tenant) for tenant in tenants], has_more=has_more)


@router.get("/{tenant}", dependencies=[require_scope(Scope.TENANT_ADMIN)])
async def get_tenant(tenant: str, services: ServicesDep) -> TenantView:
    return TenantView.of(await services.tenants.get(tenant))


@router.delete("/{tenant}", status_code=204, dependencies=[require_scope(Scope.PLATFORM_ADMIN)])
async def delete_tenant(
    tenant: str, principal: CurrentPrincipal, services: ServicesDep, confirm: str | None = None
) -> None:
    """Takes no new request from now on, lets accepted ones finish, then removes keys, adapters and files.

    Usage and audit stay. `confirm` repeats the tenant's name.
    """
    await services.tenants.delete(
        tenant, confirm=confirm, actor=principal.key_id, remove_files=services.registry.remove_tenant
    )
