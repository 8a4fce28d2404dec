"""Walks every route of the real app with every scope against the table in docs/access.md."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from fastapi import FastAPI
from sqlalchemy import select

from loraplex.platform.api_keys.principal import Scope, TenantContext
from loraplex.platform.app import create_app
from loraplex.platform.db.models import AuditEvent
from loraplex.platform.services import Services
from loraplex.platform.startup import open_services
from tests.helpers import make_checkpoint
from tests.platform.helpers import bearer, copy_migrated, create_settings

TABLE = Path(__file__).parents[3] / "docs" / "access.md"

PLACES = {
    "tenant": "acme",
    "key": "key_none",
    "adapter": "none",
    "version": "1",
    "alias": "prod",
    "model": "none",
    "request_id": "req_none",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    method: str
    template: str
    scope: Scope | None  # None = no key

    @property
    def path(self) -> str:
        return self.template.format(**PLACES)

    @property
    def is_in_a_tenant(self) -> bool:
        return "{tenant}" in self.template


def documented() -> list[Route]:
    rows = re.findall(r"^\| ([A-Z]+) \| `(\S+)` \| (?:`([a-z:]+)`|\*no key\*)", TABLE.read_text(), re.MULTILINE)
    return [Route(method=method, template=path, scope=Scope(scope) if scope else None) for method, path, scope in rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    app: FastAPI
    client: httpx.AsyncClient
    services: Services
    acme: TenantContext
    other: TenantContext

    async def key(self, *scopes: Scope, tenant: TenantContext | None) -> dict[str, str]:
        created = await self.services.api_keys.create(name="k", scopes=scopes, tenant=tenant, granted_by=None)
        return bearer(created.secret)

    async def statuses(self, headers: dict[str, str]) -> dict[Route, int]:
        """What each documented route answers, without a body: 4xx where the caller may go on."""
        return {
            route: (await self.client.request(route.method, route.path, headers=headers)).status_code
            for route in documented()
        }


@asynccontextmanager
async def open_world(folder: Path) -> AsyncIterator[World]:
    copy_migrated(folder / "data")
    settings = create_settings(
        folder / "data",
        model=str(make_checkpoint(folder / "tiny")),
        skip_tokenizer_init=True,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        adapter_slots=4,
        kv_cache_memory_gib=0.01,
    )
    async with open_services(settings) as opened:
        app = create_app(opened.services)
        await opened.engine_start
        tenants = opened.services.tenants
        for name in ("acme", "other"):
            await tenants.create(name, actor="test")
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield World(
                app=app,
                client=client,
                services=opened.services,
                acme=await tenants.context("acme"),
                other=await tenants.context("other"),
            )


def is_allowed(route: Route, scope: Scope, *, is_platform_key: bool) -> bool:
    return route.scope is None or route.scope is scope or (is_platform_key and scope is Scope.PLATFORM_ADMIN)


def grantable() -> Iterator[Scope]:
    return (scope for scope in Scope if scope is not Scope.PLATFORM_ADMIN)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    async with open_world(tmp_path_factory.mktemp("access")) as opened:
        yield opened


async def test_the_table_lists_exactly_the_routes_of_the_app(world: World) -> None:
    described = (await world.client.get("/openapi.json")).json()["paths"]
    routes = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert {(route.method, route.template) for route in documented()} == routes | {("GET", "/openapi.json")}
    assert len(documented()) == len({(route.method, route.template) for route in documented()})


async def test_without_a_key_only_the_open_routes_answer(world: World) -> None:
    for headers in ({}, bearer("lpx_" + "a" * 43)):
        statuses = await world.statuses(headers)
        assert {route.template for route, status in statuses.items() if status != 401} == {
            route.template for route in documented() if route.scope is None
        }


async def test_a_tenants_key_may_do_what_its_scope_says_and_nothing_else(world: World) -> None:
    for scope in grantable():
        statuses = await world.statuses(await world.key(scope, tenant=world.acme))
        wrong = {
            (route.method, route.template, status)
            for route, status in statuses.items()
            if (status == 403) == is_allowed(route, scope, is_platform_key=False) or status in (401, 500)
        }
        assert (scope, wrong) == (scope, set())


async def test_a_platform_key_may_do_what_its_scope_says_in_every_tenant(world: World) -> None:
    for scope in Scope:
        statuses = await world.statuses(await world.key(scope, tenant=None))
        on_v1 = {status for route, status in statuses.items() if route.template.startswith("/v1/")}
        wrong = {
            (route.method, route.template, status)
            for route, status in statuses.items()
            if not route.template.startswith("/v1/")
            and ((status == 403) == is_allowed(route, scope, is_platform_key=True) or status in (401, 500))
        }
        assert (scope, on_v1, wrong) == (scope, {400}, set())


async def test_another_tenants_key_finds_nothing_whatever_its_scopes(world: World) -> None:
    statuses = await world.statuses(await world.key(*grantable(), tenant=world.other))
    assert {status for route, status in statuses.items() if route.is_in_a_tenant} == {404}


async def test_deleting_a_tenant_of_the_real_app_takes_its_keys_and_leaves_the_audit(world: World) -> None:
    tenant = await world.services.tenants.create("going", actor="test")
    admin = await world.key(Scope.PLATFORM_ADMIN, tenant=None)
    key = await world.key(Scope.INFER, tenant=await world.services.tenants.context("going"))
    assert (await world.client.get("/v1/models", headers=key)).status_code == 200
    reply = await world.client.delete("/api/v1/tenants/going?confirm=going", headers=admin)
    assert reply.status_code == 204
    assert (await world.client.get("/v1/models", headers=key)).status_code == 401
    async with world.services.database.read_session() as session:
        audited = select(AuditEvent.action).where(AuditEvent.target == tenant.id).order_by(AuditEvent.id)
        assert (await session.scalars(audited)).all() == ["tenant.create", "tenant.delete", "tenant.removed"]


@pytest.mark.parametrize("path", ["/readyz/", "/v1/chat/completions/", "/api/v1/tenants/"])
async def test_no_path_leads_elsewhere(world: World, path: str) -> None:
    """A redirect would name the host and scheme that this process knows, and a client would send its key there."""
    headers = await world.key(Scope.PLATFORM_ADMIN, tenant=None)
    assert (await world.client.get(path, headers=headers)).status_code in (400, 404)
