from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loraplex.platform.api_keys.principal import Scope as KeyScope
from loraplex.platform.deps import CurrentPrincipal, PathTenant, RequestId, RequestTenant, require_scope
from tests.platform.helpers import BaseWorld, open_base_world, serve


def add_routes(app: FastAPI) -> None:
    """Stand-ins of the routes that the rest of the platform adds; each tells what it was given."""

    @app.get("/livez")
    async def livez() -> str:
        return "live"

    @app.get("/metrics")
    async def metrics() -> str:
        return "metrics"

    @app.get("/v1/models", dependencies=[require_scope(KeyScope.INFER)])
    @app.get("/tenants/{tenant}/v1/models", dependencies=[require_scope(KeyScope.INFER)])
    async def models(tenant: RequestTenant, principal: CurrentPrincipal, request_id: RequestId) -> dict[str, str]:
        return {"tenant": tenant.name, "key": principal.key_id, "request_id": request_id}

    @app.post(
        "/api/v1/tenants/{tenant}/adapters/{adapter}/versions", dependencies=[require_scope(KeyScope.ADAPTERS_WRITE)]
    )
    async def upload(request: Request, tenant: PathTenant) -> int:
        return sum([len(chunk) async for chunk in request.stream()])


@pytest.fixture
async def world(data_dir: Path) -> AsyncIterator[BaseWorld]:
    async with open_base_world(data_dir, add_routes=add_routes) as opened:
        yield opened


def fault(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.parametrize("path", ["/livez", "/openapi.json"])
async def test_probes_and_the_description_need_no_key(world: BaseWorld, path: str) -> None:
    assert (await world.client.get(path)).status_code == 200


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/assets/app.js"])
async def test_the_user_interface_needs_no_key(world: BaseWorld, path: str) -> None:
    assert (await world.client.get(path)).status_code == 404  # not built here, but nobody was asked for a key


@pytest.mark.parametrize(
    "path", ["/v1/models", "/api/v1/tenants", "/no/such/route", "/", "/metrics", "/livez/", "/adminx", "/docs"]
)
async def test_everything_else_needs_one(world: BaseWorld, path: str) -> None:
    reply = await world.client.get(path)
    assert fault(reply) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic dTpw", "lpx_" + "a" * 43, "Bearer lpx_" + "a" * 43, "Bearer ä"]
)
async def test_a_header_that_names_no_key_is_401(world: BaseWorld, header: str) -> None:
    reply = await world.client.get("/v1/models", headers=[(b"authorization", header.encode())])
    assert fault(reply) == (401, "invalid_api_key")


async def test_two_keys_in_one_request_are_401(world: BaseWorld) -> None:
    key = (await world.key(KeyScope.INFER, tenant=await world.tenant("acme")))["authorization"]
    reply = await world.client.get("/v1/models", headers=[("authorization", key), ("authorization", key)])
    assert fault(reply) == (401, "invalid_api_key")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_tenants_key_runs_in_its_tenant(world: BaseWorld, scheme: str) -> None:
    key = await world.key(KeyScope.INFER, tenant=await world.tenant("acme"))
    headers = {"authorization": key["authorization"].replace("Bearer", scheme)}
    for path in ("/v1/models", "/tenants/acme/v1/models"):
        assert (await world.client.get(path, headers=headers)).json()["tenant"] == "acme"


@pytest.mark.parametrize(
    "path", ["/tenants/{}/v1/models", "/api/v1/tenants/{}/keys", "/api/v1/tenants/{}", "/tenants/{}/no/such/route"]
)
async def test_another_tenant_and_one_that_does_not_exist_look_the_same(world: BaseWorld, path: str) -> None:
    acme = await world.tenant("acme")
    key = await world.key(*(set(KeyScope) - {KeyScope.PLATFORM_ADMIN}), tenant=acme)
    other = await world.tenant("other")
    replies = [
        await world.client.request(method, path.format(name), headers=key)
        for name in ("other", other.id, "nobody")
        for method in ("GET", "POST", "DELETE")
    ]
    assert {fault(reply) for reply in replies} == {(404, "not_found")}
    assert len({reply.content for reply in replies}) == 1
    volatile = ("x-request-id", "content-length", "content-type")
    assert {tuple(name for name in reply.headers if name not in volatile) for reply in replies} == {()}


async def test_a_platform_key_names_the_tenant_in_the_path(world: BaseWorld) -> None:
    await world.tenant("acme")
    direct = await world.client.get("/v1/models", headers=world.admin)
    assert fault(direct) == (400, "invalid_request")
    assert "/tenants/{tenant}/v1/models" in direct.json()["error"]["message"]
    assert (await world.client.get("/tenants/acme/v1/models", headers=world.admin)).json()["tenant"] == "acme"
    assert fault(await world.client.get("/tenants/nobody/v1/models", headers=world.admin)) == (404, "not_found")


async def test_a_platform_key_with_one_scope_may_do_that_in_every_tenant_and_no_more(world: BaseWorld) -> None:
    await world.tenant("acme")
    key = await world.key(KeyScope.INFER)
    assert (await world.client.get("/tenants/acme/v1/models", headers=key)).status_code == 200
    assert fault(await world.client.get("/api/v1/tenants/acme/keys", headers=key)) == (403, "insufficient_scope")
    assert fault(await world.client.get("/api/v1/keys", headers=key)) == (403, "insufficient_scope")


async def test_a_missing_scope_is_403_and_named(world: BaseWorld) -> None:
    key = await world.key(KeyScope.ADAPTERS_READ, tenant=await world.tenant("acme"))
    reply = await world.client.get("/v1/models", headers=key)
    assert fault(reply) == (403, "insufficient_scope")
    assert "infer" in reply.json()["error"]["message"]


async def test_metrics_need_their_scope(world: BaseWorld) -> None:
    acme = await world.tenant("acme")
    assert (await world.client.get("/metrics", headers=await world.key(KeyScope.INFER, tenant=acme))).status_code == 403
    allowed = await world.key(KeyScope.METRICS_READ, tenant=acme)
    assert (await world.client.get("/metrics", headers=allowed)).status_code == 200


async def test_metrics_can_be_made_public(data_dir: Path) -> None:
    async with open_base_world(data_dir, add_routes=add_routes, metrics_public=True) as world:
        assert (await world.client.get("/metrics")).status_code == 200


async def test_the_request_id_is_the_servers_and_the_clients_own_is_only_echoed(world: BaseWorld) -> None:
    key = await world.key(KeyScope.INFER, tenant=await world.tenant("acme"))
    replies = [await world.client.get("/v1/models", headers={**key, "x-request-id": "mine"}) for _ in range(2)]
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(ids)) == 2
    assert ids == [reply.json()["request_id"] for reply in replies]
    assert [reply.headers["x-client-request-id"] for reply in replies] == ["mine", "mine"]


@pytest.mark.parametrize("given", [b"", b"x" * 129, b"a\xffb", b"a\x01b"])
async def test_an_odd_request_id_is_not_echoed(world: BaseWorld, given: bytes) -> None:
    reply = await world.client.get("/livez", headers=[(b"x-request-id", given)])
    assert "x-client-request-id" not in reply.headers
    assert reply.headers["x-request-id"].startswith("req_")


async def test_refusals_have_a_request_id_too(world: BaseWorld) -> None:
    assert (await world.client.get("/v1/models")).headers.get_list("x-request-id")[0].startswith("req_")


async def test_a_preflight_needs_no_key_and_other_origins_get_none_of_it(data_dir: Path) -> None:
    origin = "https://ui.example"
    async with open_base_world(data_dir, add_routes=add_routes, cors_origin=(origin,)) as world:
        ask = {"origin": origin, "access-control-request-method": "POST"}
        preflight = await world.client.options("/v1/models", headers=ask)
        assert (preflight.status_code, preflight.headers["access-control-allow-origin"]) == (200, origin)
        refused = await world.client.get("/v1/models", headers={"origin": origin})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
        foreign = await world.client.get("/livez", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in foreign.headers


async def test_without_an_allowed_origin_there_is_no_cross_origin_access(world: BaseWorld) -> None:
    preflight = await world.client.options(
        "/v1/models", headers={"origin": "https://a.example", "access-control-request-method": "POST"}
    )
    assert preflight.status_code == 401
    assert "access-control-allow-origin" not in preflight.headers


UPLOAD = "/api/v1/tenants/acme/adapters/a/versions"


class ByteCounter:
    """Counts the bytes of bodies that the app takes from the server, which reads at most 64 KiB ahead of it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.num_received = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting() -> Message:
            message = await receive()
            self.num_received += len(message.get("body", b""))
            return message

        await self._app(scope, counting, send)


async def send_endlessly(port: int, path: str, key: dict[str, str]) -> tuple[int, dict[str, str]]:
    """Write a chunked body until the server has answered and closed; its status and error."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = [f"POST {path} HTTP/1.1", "host: test", "transfer-encoding: chunked", "content-type: application/zip"]
    head += [f"{name}: {value}" for name, value in key.items()]
    writer.write("\r\n".join([*head, "", ""]).encode())

    async def pour() -> None:
        chunk = b"2000\r\n" + b"x" * 8192 + b"\r\n"
        while True:
            writer.write(chunk)
            await writer.drain()

    pouring = asyncio.create_task(pour())
    status_line = await reader.readline()
    headers = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in headers.decode().lower().splitlines() if line.startswith("content-length"))
    body = await reader.readexactly(int(length.partition(":")[2]))
    outcome = await asyncio.gather(pouring, return_exceptions=True)  # ends when the server has closed
    assert isinstance(outcome[0], ConnectionError)
    writer.close()
    return int(status_line.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize(
    "kind", ["no key", "unknown key", "revoked key", "other tenant's key", "deleted tenant", "no scope"]
)
async def test_an_endless_upload_without_right_is_answered_and_cut_off_before_a_mebibyte(
    world: BaseWorld, kind: str
) -> None:
    acme = await world.tenant("acme")
    key, status = await unfit_key(world, kind)
    counted = ByteCounter(world.app)
    async with serve(counted) as port:
        answered, error = await send_endlessly(port, UPLOAD, key)
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    assert (answered, error["type"]) == (status, kinds[status])
    assert counted.num_received < 1 << 20
    assert world.installation.tenants.in_flight[acme.id] == 0


async def unfit_key(world: BaseWorld, kind: str) -> tuple[dict[str, str], int]:
    if kind == "no key":
        return {}, 401
    if kind == "unknown key":
        return {"authorization": "Bearer lpx_" + "a" * 43}, 401
    if kind == "other tenant's key":
        return await world.key(KeyScope.ADAPTERS_WRITE, tenant=await world.tenant("other")), 404
    acme = await world.installation.tenants.context("acme")
    if kind == "no scope":
        return await world.key(KeyScope.ADAPTERS_READ, tenant=acme), 403
    created = await world.installation.api_keys.create(
        name="k", scopes=[KeyScope.ADAPTERS_WRITE], tenant=acme, granted_by=None
    )
    headers = {"authorization": f"Bearer {created.secret}"}
    await world.installation.api_keys.authenticate(created.secret)
    if kind == "revoked key":
        await world.installation.api_keys.revoke(created.key.id, acme, actor="host")
        return headers, 401
    await world.installation.tenants.mark_deleting("acme", confirm="acme", actor="host")
    return headers, 404


async def test_a_refused_client_that_sends_its_whole_body_first_still_hears_the_answer(world: BaseWorld) -> None:
    async with serve(world.app) as port, httpx.AsyncClient() as client:
        for size in (10, 60_000, 200_000, 8_000_000):
            reply = await client.post(f"http://127.0.0.1:{port}{UPLOAD}", content=b"x" * size)
            assert fault(reply) == (401, "invalid_api_key")


async def test_an_allowed_upload_is_not_capped_by_the_layer_for_json(world: BaseWorld) -> None:
    key = await world.key(KeyScope.ADAPTERS_WRITE, tenant=await world.tenant("acme"))
    reply = await world.client.post(UPLOAD, content=b"x" * (9 << 20), headers=key)
    assert reply.json() == 9 << 20
