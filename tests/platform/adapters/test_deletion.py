"""Deleting: 404 at once, accepted requests finish, then nothing is left."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.platform.adapters.resolution import RequestedAdapter, ResolvedSelection
from loraplex.platform.errors import NotFoundError
from tests.platform.adapters.helpers import RegistryWorld, adapter_files


async def resolve(world: RegistryWorld, name: str = "sql") -> ResolvedSelection:
    return await world.registry.resolve(world.tenant, [RequestedAdapter(name=name)])


async def test_deleting_waits_for_accepted_requests_and_refuses_new_ones(world: RegistryWorld) -> None:
    digest = (await world.upload("sql")).json()["digest"]
    resolved = await resolve(world)
    async with world.registry.hold(resolved):
        assert (await world.call("DELETE", "sql")).status_code == 204
        with pytest.raises(NotFoundError):
            await resolve(world)
        assert (await world.call("GET", "sql")).status_code == 404
        await asyncio.sleep(0.05)
        assert world.engine.calls == [], "the engine keeps what a request runs through"
        assert await world.store.has_version(digest)
    await world.registry.wait_removed()
    assert world.engine.calls == [("unload", digest)]
    assert world.stored_objects() == []


async def test_a_request_that_was_resolved_before_and_begins_after_the_deletion_is_a_404(world: RegistryWorld) -> None:
    await world.upload("sql")
    resolved = await resolve(world)
    await world.call("DELETE", "sql")
    with pytest.raises(NotFoundError, match="sql@1"):
        async with world.registry.hold(resolved):
            pass
    await world.registry.wait_removed()


async def test_moving_an_alias_does_not_end_accepted_requests(world: RegistryWorld) -> None:
    for seed in (1, 2):
        await world.upload("sql", adapter_files(seed=seed))
    resolved = await resolve(world)
    async with world.registry.hold(resolved):
        await world.call("PUT", "sql", "/aliases/default", json={"version": 2})
        assert (await world.call("DELETE", "sql", "/versions/1")).status_code == 204
        assert await world.store.has_version(resolved.adapters[0].digest)
    await world.registry.wait_removed()
    assert not await world.store.has_version(resolved.adapters[0].digest)
    assert (await resolve(world)).adapters[0].version == 2


async def test_a_version_that_an_alias_targets_is_a_409_naming_it(world: RegistryWorld) -> None:
    for seed in (1, 2):
        await world.upload("sql", adapter_files(seed=seed))
    await world.call("PUT", "sql", "/aliases/prod", json={"version": 2})
    for version, alias in ((1, "default"), (2, "prod")):
        reply = await world.call("DELETE", "sql", f"/versions/{version}")
        assert (reply.status_code, alias in reply.json()["error"]["message"]) == (409, True)
    await world.call("DELETE", "sql", "/aliases/prod")
    assert (await world.call("DELETE", "sql", "/versions/2")).status_code == 204
    assert (await world.call("GET", "sql", "/versions/2")).status_code == 404


async def test_bytes_that_another_version_owns_stay(world: RegistryWorld) -> None:
    _, headers = await world.other_tenant("stranger")
    digest = (await world.upload("sql")).json()["digest"]
    await world.upload("sql", tenant="stranger", headers=headers)
    stored = world.stored_objects()
    await world.call("DELETE", "sql")
    await world.registry.wait_removed()
    assert world.stored_objects() == stored
    assert world.engine.calls == [], "the other tenant's requests still run through these slots"
    await world.client.delete(world.url("sql", tenant="stranger"), headers=headers)
    await world.registry.wait_removed()
    assert world.stored_objects() == []
    assert world.engine.calls == [("unload", digest)]


async def test_one_shared_file_of_two_versions_stays_with_the_other(world: RegistryWorld) -> None:
    for seed in (1, 2):  # one config, two weights
        await world.upload("sql", adapter_files(seed=seed))
    await world.call("DELETE", "sql", "/versions/2")
    await world.registry.wait_removed()
    kept = (await world.call("GET", "sql", "/versions/1")).json()
    assert sorted(world.stored_objects()) == sorted(
        [*(file["sha256"] for file in kept["files"]), f"{kept['digest']}.json"]
    )


async def test_an_upload_of_bytes_that_are_just_being_removed_keeps_them(world: RegistryWorld) -> None:
    await world.upload("sql")
    for _ in range(5):
        deleted, uploaded = await asyncio.gather(world.call("DELETE", "sql"), world.upload("other"))
        assert (deleted.status_code, uploaded.status_code) == (204, 201)
        await world.registry.wait_removed()
        assert await world.store.has_version(uploaded.json()["digest"])
        for file in uploaded.json()["files"]:
            assert await world.store.has_blob(file["sha256"])
        deleted, uploaded = await asyncio.gather(world.call("DELETE", "other"), world.upload("sql"))
        assert (deleted.status_code, uploaded.status_code) == (204, 201)
        await world.registry.wait_removed()
        for file in uploaded.json()["files"]:
            assert await world.store.has_blob(file["sha256"])


async def test_removing_a_tenant_removes_all_its_adapters(world: RegistryWorld) -> None:
    for name in ("a", "b"):
        await world.upload(name, adapter_files(seed=ord(name)))
    await world.call("PUT", "a", "/versions/1/pin")
    resolved = await resolve(world, "b")
    async with world.registry.hold(resolved):
        removal = asyncio.create_task(world.registry.remove_tenant(world.tenant.id))
        await asyncio.sleep(0.1)
        assert not removal.done()
        with pytest.raises(NotFoundError):
            await resolve(world, "a")
    await removal
    assert world.stored_objects() == []
    assert world.engine.pinned == set()
    await world.registry.remove_tenant(world.tenant.id)


async def test_deleting_over_the_api_removes_the_tenant_and_its_files(world: RegistryWorld) -> None:
    await world.upload("sql")
    reply = await world.client.delete("/api/v1/tenants/acme?confirm=acme", headers=world.base.admin)
    assert reply.status_code == 204
    assert world.stored_objects() == []


async def test_an_adapter_deleted_during_its_upload_does_not_come_back(
    world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.upload("sql", adapter_files(seed=1))
    put_version = world.store.put_version

    async def put_after_delete(*arguments: object) -> None:
        await world.call("DELETE", "sql")
        await put_version(*arguments)  # type: ignore[arg-type]  # passed through

    monkeypatch.setattr(world.store, "put_version", put_after_delete)
    reply = await world.upload("sql", adapter_files(seed=2))
    assert (reply.status_code, "deleted during the upload" in reply.json()["error"]["message"]) == (409, True)
    await world.registry.wait_removed()
    assert world.stored_objects() == []
    assert (await world.call("GET", "sql")).status_code == 404
