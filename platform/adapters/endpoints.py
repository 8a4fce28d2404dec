"""Adapters of a tenant: upload, look, move aliases, keep in memory, delete."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request, Response
from pydantic import BeforeValidator

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.adapters.naming import check_version_digits
from loraplex.platform.adapters.schemas import MAX_VERSION, AdapterView, AliasView, PutAlias, VersionView
from loraplex.platform.adapters.upload import Refusal, read_upload
from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.deps import CurrentPrincipal, PathTenant, ServicesDep, require_scope
from loraplex.platform.http.json_body import JsonRoute
from loraplex.platform.paging import After, Limit, Page, cut

router = APIRouter(route_class=JsonRoute, prefix="/api/v1/tenants/{tenant}/adapters", tags=["adapters"])

CAN_READ = [require_scope(Scope.ADAPTERS_READ)]
CAN_WRITE = [require_scope(Scope.ADAPTERS_WRITE)]

Version = Annotated[int, Path(ge=1, le=MAX_VERSION), BeforeValidator(check_version_digits)]
Before = Annotated[int | None, Query(ge=1, le=MAX_VERSION, description="Only versions below this number.")]
IfMatch = Annotated[str | None, Header(description="Change the alias only if this is its etag.", max_length=64)]


@router.get("", dependencies=CAN_READ)
async def list_adapters(
    tenant: PathTenant, services: ServicesDep, after: After = None, limit: Limit = 100
) -> Page[AdapterView]:
    adapters = await services.registry.list_adapters(tenant, after=after or "", limit=limit + 1)
    shown, has_more = cut(adapters, limit)
    return Page(data=[AdapterView.of(adapter) for adapter in shown], has_more=has_more)


@router.get("/{adapter}", dependencies=CAN_READ)
async def get_adapter(adapter: str, tenant: PathTenant, services: ServicesDep) -> AdapterView:
    return AdapterView.of(await services.registry.get_adapter(tenant, adapter))


@router.delete("/{adapter}", status_code=204, dependencies=CAN_WRITE)
async def delete_adapter(adapter: str, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep) -> None:
    """New requests get 404 from now on, accepted ones finish; then weights and files are removed."""
    await services.registry.retirement.delete_adapter(tenant, adapter, actor=principal.key_id)


@router.post("/{adapter}/versions", status_code=201, dependencies=CAN_WRITE, response_model=VersionView)
async def create_version(
    adapter: str, request: Request, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> VersionView | Response:
    """Upload the next version: multipart field `files` (the folder's files, or one zip), or a raw `application/zip`.

    The adapter is made at need. The reply comes when the version is ready, or names all reasons why it is refused.
    """
    registry = services.registry
    async with registry.uploads.allocate() as area:
        try:
            registry.check_upload(adapter)
            body = await read_upload(request, area)
        except LoraplexError as error:
            return Refusal(error)  # which gets rid of a body that nobody will read
        received = await body.unpack()
        version = await registry.publisher.publish(tenant, adapter, area.files, received, actor=principal.key_id)
    return VersionView.of(adapter, version)


@router.get("/{adapter}/versions", dependencies=CAN_READ)
async def list_versions(
    adapter: str, tenant: PathTenant, services: ServicesDep, before: Before = None, limit: Limit = 100
) -> Page[VersionView]:
    """Newest first."""
    versions = await services.registry.list_versions(tenant, adapter, before=before, limit=limit + 1)
    shown, has_more = cut(versions, limit)
    return Page(data=[VersionView.of(adapter, version) for version in shown], has_more=has_more)


@router.get("/{adapter}/versions/{version}", dependencies=CAN_READ)
async def get_version(adapter: str, version: Version, tenant: PathTenant, services: ServicesDep) -> VersionView:
    return VersionView.of(adapter, await services.registry.get_version(tenant, adapter, version))


@router.delete("/{adapter}/versions/{version}", status_code=204, dependencies=CAN_WRITE)
async def delete_version(
    adapter: str, version: Version, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> None:
    """409 while an alias targets the version."""
    await services.registry.retirement.delete_version(tenant, adapter, version, actor=principal.key_id)


@router.post("/{adapter}/versions/{version}/load", status_code=204, dependencies=CAN_WRITE)
async def load_version(
    adapter: str, version: Version, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> None:
    """Make it resident; the reply comes when it is."""
    await services.registry.residency.load(tenant, adapter, version, actor=principal.key_id)


@router.post("/{adapter}/versions/{version}/unload", status_code=204, dependencies=CAN_WRITE)
async def unload_version(
    adapter: str, version: Version, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> None:
    """Free its memory; the reply comes when the last request that runs through it has ended."""
    await services.registry.residency.unload(tenant, adapter, version, actor=principal.key_id)


@router.put("/{adapter}/versions/{version}/pin", status_code=204, dependencies=CAN_WRITE)
async def pin_version(
    adapter: str, version: Version, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> None:
    """Keep it resident, also after a restart."""
    await services.registry.residency.pin(tenant, adapter, version, actor=principal.key_id)


@router.delete("/{adapter}/versions/{version}/pin", status_code=204, dependencies=CAN_WRITE)
async def unpin_version(
    adapter: str, version: Version, tenant: PathTenant, principal: CurrentPrincipal, services: ServicesDep
) -> None:
    await services.registry.residency.unpin(tenant, adapter, version, actor=principal.key_id)


@router.get("/{adapter}/aliases", dependencies=CAN_READ)
async def list_aliases(adapter: str, tenant: PathTenant, services: ServicesDep) -> Page[AliasView]:
    aliases = await services.registry.aliases.list(tenant, adapter)
    return Page(data=[AliasView.of(alias) for alias in aliases], has_more=False)


@router.get("/{adapter}/aliases/{alias}", dependencies=CAN_READ)
async def get_alias(
    adapter: str, alias: str, tenant: PathTenant, services: ServicesDep, response: Response
) -> AliasView:
    return _tagged(AliasView.of(await services.registry.aliases.get(tenant, adapter, alias)), response)


@router.put("/{adapter}/aliases/{alias}", dependencies=CAN_WRITE)
async def put_alias(
    adapter: str,
    alias: str,
    body: PutAlias,
    tenant: PathTenant,
    principal: CurrentPrincipal,
    services: ServicesDep,
    response: Response,
    if_match: IfMatch = None,
) -> AliasView:
    """Point the alias to a version; what is running stays where it is. With `If-Match`: 409 if it was changed since."""
    put = await services.registry.aliases.put(
        tenant, adapter, alias, version=body.target, if_match=_etag(if_match), actor=principal.key_id
    )
    return _tagged(AliasView.of(put), response)


@router.delete("/{adapter}/aliases/{alias}", status_code=204, dependencies=CAN_WRITE)
async def delete_alias(
    adapter: str,
    alias: str,
    tenant: PathTenant,
    principal: CurrentPrincipal,
    services: ServicesDep,
    if_match: IfMatch = None,
) -> None:
    await services.registry.aliases.delete(tenant, adapter, alias, if_match=_etag(if_match), actor=principal.key_id)


def _tagged(view: AliasView, response: Response) -> AliasView:
    response.headers["etag"] = f'"{view.etag}"'
    return view


def _etag(if_match: str | None) -> str | None:
    return None if if_match is None else if_match.strip().strip('"')
