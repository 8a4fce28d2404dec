from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fastapi import FastAPI
from sqlalchemy import select

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.db.models import AuditEvent, Tenant, UsageRecord
from loraplex.platform.deps import PathTenant
from loraplex.platform.errors import NotFoundError
from loraplex.platform.tenants import service
from loraplex.platform.tenants.service import TenantService
from tests.platform.helpers import BaseWorld, open_base_world

TENANTS = "/api/v1/tenants"


async def actions(world: BaseWorld) -> list[str]:
    async with world.installation.database.read_session() as session:
        events = (await session.scalars(select(AuditEvent).order_by(AuditEvent.id))).all()
    return [event.action for event in events]


async def test_a_tenant_is_created_listed_and_shown_without_its_salt(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        created = await world.client.post(TENANTS, json={"name": "acme"}, headers=world.admin)
        assert created.status_code == 201
        assert created.json()["name"] == "acme"
        shown = await world.client.get(f"{TENANTS}/acme", headers=world.admin)
        by_id = await world.client.get(f"{TENANTS}/{created.json()['id']}", headers=world.admin)
        listed = await world.client.get(TENANTS, headers=world.admin)
        assert shown.json() == by_id.json() == created.json() == listed.json()["data"][0]
        assert set(shown.json()) == {"id", "name", "status", "created_at"}


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "_a", "a b", "a/b", "a@1", "a:b", "a" * 64, "ä", "a\n"])
async def test_a_bad_name_is_refused(data_dir: Path, name: str) -> None:
    async with open_base_world(data_dir) as world:
        reply = await world.client.post(TENANTS, json={"name": name}, headers=world.admin)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")


@pytest.mark.parametrize("name", ["a", "0", "a.b_c-d", "a" * 63])
async def test_a_good_name_is_taken(data_dir: Path, name: str) -> None:
    async with open_base_world(data_dir) as world:
        reply = await world.client.post(TENANTS, json={"name": name}, headers=world.admin)
        assert (reply.status_code, reply.json()["name"]) == (201, name)


async def test_a_name_that_is_taken_is_a_conflict_and_leaves_no_trace(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        for status in (201, 409):
            reply = await world.client.post(TENANTS, json={"name": "acme"}, headers=world.admin)
            assert reply.status_code == status
        assert (await actions(world)).count("tenant.create") == 1


async def test_racing_creations_of_one_name_make_one_tenant(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        replies = await asyncio.gather(
            *(world.client.post(TENANTS, json={"name": "acme"}, headers=world.admin) for _ in range(6))
        )
        assert sorted(reply.status_code for reply in replies) == [201, 409, 409, 409, 409, 409]


async def test_long_lists_page(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        names = [f"tenant-{number}" for number in range(5)]
        for name in names:
            await world.tenant(name)
        seen: list[str] = []
        query: dict[str, str | int] = {"limit": 2}
        while True:
            page = (await world.client.get(TENANTS, params=query, headers=world.admin)).json()
            seen += [tenant["name"] for tenant in page["data"]]
            if not page["has_more"]:
                break
            query["after"] = seen[-1]
        assert seen == names


@pytest.mark.parametrize(("query", "status"), [("", 400), ("?confirm=acm", 409), ("?confirm=", 409)])
async def test_a_deletion_must_be_confirmed_by_name(data_dir: Path, query: str, status: int) -> None:
    async with open_base_world(data_dir) as world:
        await world.tenant("acme")
        reply = await world.client.delete(f"{TENANTS}/acme{query}", headers=world.admin)
        assert (reply.status_code, reply.json()["error"]["param"]) == (status, "confirm")
        assert (await world.installation.tenants.get("acme")).status == "active"
        assert world.registry.ids == []


async def test_a_deletion_removes_keys_and_files_and_keeps_usage_and_audit(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        key = await world.key(Scope.TENANT_ADMIN, tenant=acme)
        async with world.installation.database.session() as session:
            session.add(
                UsageRecord(
                    tenant="acme",
                    key_id="key_1",
                    request_id="req_1",
                    prompt_tokens=1,
                    cached_tokens=0,
                    completion_tokens=1,
                    finish_reason="stop",
                )
            )
        assert (await world.client.get(f"{TENANTS}/acme/keys", headers=key)).status_code == 200
        reply = await world.client.delete(f"{TENANTS}/acme?confirm=acme", headers=world.admin)
        assert (reply.status_code, reply.content) == (204, b"")
        assert world.registry.ids == [acme.id]
        assert (await world.client.get(f"{TENANTS}/acme/keys", headers=key)).status_code == 401
        assert (await world.client.get(f"{TENANTS}/acme", headers=world.admin)).status_code == 404
        assert (await actions(world))[-2:] == ["tenant.delete", "tenant.removed"]
        async with world.installation.database.read_session() as session:
            assert (await session.scalars(select(UsageRecord.tenant))).all() == ["acme"]
        assert (await world.tenant("acme")).id != acme.id


def add_slow_route(app: FastAPI, *, entered: asyncio.Event, finish: asyncio.Event) -> None:
    @app.get("/tenants/{tenant}/v1/slow")
    async def slow(tenant: PathTenant) -> str:
        entered.set()
        await finish.wait()
        return tenant.name


async def test_a_deletion_waits_for_accepted_requests_and_takes_no_new_ones(data_dir: Path) -> None:
    entered, finish = asyncio.Event(), asyncio.Event()
    async with open_base_world(
        data_dir, add_routes=lambda app: add_slow_route(app, entered=entered, finish=finish)
    ) as world:
        acme = await world.tenant("acme")
        key = await world.key(Scope.INFER, tenant=acme)
        running = asyncio.create_task(world.client.get("/tenants/acme/v1/slow", headers=key))
        await entered.wait()
        deletion = asyncio.create_task(world.client.delete(f"{TENANTS}/acme?confirm=acme", headers=world.admin))
        while (await world.installation.tenants.get("acme")).status == "active":
            await asyncio.sleep(0.01)
        for headers in (key, world.admin):
            reply = await world.client.get("/tenants/acme/v1/slow", headers=headers)
            assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no such tenant")
        assert (await world.client.get(f"{TENANTS}/acme", headers=world.admin)).json()["status"] == "deleting"
        assert world.registry.ids == []
        finish.set()
        assert (await running).json() == "acme"
        assert (await deletion).status_code == 204
        assert world.registry.ids == [acme.id]


async def test_a_deletion_outlives_its_caller_and_a_second_one_joins_it(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        tenants = world.installation.tenants
        tenants.in_flight.enter(acme.id)
        deletions = [
            asyncio.create_task(
                tenants.delete("acme", confirm="acme", actor="a", remove_files=world.registry.remove_tenant)
            )
            for _ in range(2)
        ]
        while (await tenants.get("acme")).status == "active":
            await asyncio.sleep(0.01)
        deletions[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await deletions[0]
        tenants.in_flight.leave(acme.id)
        await deletions[1]
        assert world.registry.ids == [acme.id]


async def test_a_deletion_that_failed_or_was_cut_short_is_taken_up_again(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        world.registry.failures = 2
        reply = await world.client.delete(f"{TENANTS}/acme?confirm=acme", headers=world.admin)
        assert reply.status_code == 500
        assert "store" not in reply.text
        tenants = world.installation.tenants
        await tenants.finish_deletions(world.registry.remove_tenant)
        assert (await tenants.get("acme")).status == "deleting"
        await tenants.finish_deletions(world.registry.remove_tenant)
        assert world.registry.ids == [acme.id]
        with pytest.raises(NotFoundError):
            await tenants.get("acme")


async def test_a_running_server_removes_what_the_host_marks(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "FINISH_INTERVAL_S", 0.01)
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        tenants = world.installation.tenants
        async with tenants.finishing_deletions(world.registry.remove_tenant):
            await TenantService(
                world.installation.database, world.installation.secret_key, world.installation.api_keys
            ).mark_deleting("acme", confirm="acme", actor="host")
            while not world.registry.ids:
                await asyncio.sleep(0.01)
        assert world.registry.ids == [acme.id]


async def test_a_shut_down_cuts_waiting_deletions_short(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        tenants = world.installation.tenants
        tenants.in_flight.enter(acme.id)
        async with tenants.finishing_deletions(world.registry.remove_tenant):
            await tenants.mark_deleting("acme", confirm="acme", actor="host")
            await asyncio.sleep(0)
            deletion = asyncio.create_task(
                tenants.delete("acme", confirm="acme", actor="host", remove_files=world.registry.remove_tenant)
            )
            while tenants.in_flight.is_open(acme.id):
                await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await deletion
        assert world.registry.ids == []
        assert (await tenants.get("acme")).status == "deleting"


async def test_no_request_slips_in_after_the_last_one_was_waited_for(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        in_flight = world.installation.tenants.in_flight
        in_flight.enter(acme.id)
        drained = asyncio.create_task(in_flight.drain(acme.id))
        await asyncio.sleep(0)
        with pytest.raises(NotFoundError):
            in_flight.enter(acme.id)
        assert not drained.done()
        in_flight.leave(acme.id)
        await drained
        assert in_flight[acme.id] == 0


async def test_a_salt_is_random_per_tenant(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        for name in ("a", "b"):
            await world.tenant(name)
        async with world.installation.database.read_session() as session:
            salts = (await session.scalars(select(Tenant.cache_salt))).all()
        assert len(set(salts)) == 2
        assert {len(salt) for salt in salts} == {32}
