"""Load, unload, pin: the last acknowledged call holds, pins outlive engines."""

from __future__ import annotations

import asyncio
import random

import pytest

from loraplex.adapters.errors import AdapterLoadError, NeverFitsError
from loraplex.engine.errors import EngineDeadError
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.keyed_lock import KeyedLock
from tests.platform.adapters.helpers import RegistryWorld, adapter_files


async def test_random_calls_of_many_tasks_end_in_the_last_acknowledged_state(world: RegistryWorld) -> None:
    names = ("a", "b", "c")
    digests = {name: (await world.upload(name, adapter_files(seed=ord(name)))).json()["digest"] for name in names}
    acknowledged: dict[str, str] = {}
    dice = random.Random(3)

    async def call(name: str, action: str) -> None:
        if action == "generate":
            async with world.registry.hold(await world.registry.resolve(world.tenant, [RequestedAdapter(name=name)])):
                await asyncio.sleep(0)
            return
        reply = await world.call("POST", name, f"/versions/1/{action}")
        assert reply.status_code == 204
        acknowledged[name] = action

    async def work(calls: list[tuple[str, str]]) -> None:
        for name, action in calls:
            await call(name, action)

    calls = [(dice.choice(names), dice.choice(("load", "unload", "generate"))) for _ in range(100)]
    await asyncio.gather(*(work(calls[task::16]) for task in range(16)))
    for name, action in acknowledged.items():
        last = [what for what, digest in world.engine.calls if digest == digests[name]][-1]
        assert last == action
        assert (digests[name] in world.engine.resident) == (action == "load")


async def test_a_keyed_lock_excludes_by_key_and_keeps_nothing() -> None:
    lock = KeyedLock()
    inside: list[str] = []

    async def work(key: str) -> None:
        async with lock.hold(key):
            assert key not in inside
            inside.append(key)
            await asyncio.sleep(0)
            inside.remove(key)

    tasks = [asyncio.create_task(work(key)) for key in "abc" * 10]
    await asyncio.sleep(0)
    assert 0 < len(lock) <= 3
    tasks[5].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(lock) == 0


async def test_a_load_that_fails_says_why_and_harms_nobody_else(world: RegistryWorld) -> None:
    await world.upload("sql")
    world.engine.failure = AdapterLoadError("adapter_model.safetensors is missing from the store")
    reply = await world.call("POST", "sql", "/versions/1/load")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapter_load_failed")
    world.engine.failure = None
    assert (await world.call("POST", "sql", "/versions/1/load")).status_code == 204


@pytest.mark.parametrize(
    ("method", "rest"), [("POST", "/load"), ("POST", "/unload"), ("PUT", "/pin"), ("DELETE", "/pin"), ("DELETE", "")]
)
async def test_what_does_not_exist_is_a_404(world: RegistryWorld, method: str, rest: str) -> None:
    await world.upload("sql")
    for name, version in (("sql", 9), ("nope", 1)):
        assert (await world.call(method, name, f"/versions/{version}{rest}")).status_code == 404
    assert world.engine.calls == []


async def test_a_pinned_version_is_not_unloaded(world: RegistryWorld) -> None:
    await world.upload("sql")
    assert (await world.call("PUT", "sql", "/versions/1/pin")).status_code == 204
    assert (await world.call("GET", "sql", "/versions/1")).json()["pinned"] is True
    reply = await world.call("POST", "sql", "/versions/1/unload")
    assert (reply.status_code, "pinned" in reply.json()["error"]["message"]) == (409, True)
    assert (await world.call("DELETE", "sql", "/versions/1/pin")).status_code == 204
    assert (await world.call("POST", "sql", "/versions/1/unload")).status_code == 204
    assert world.engine.resident == set()


async def test_a_pin_that_the_engine_refuses_is_not_stored(world: RegistryWorld) -> None:
    await world.upload("sql")
    world.engine.failure = NeverFitsError("no slot would be left")
    assert (await world.call("PUT", "sql", "/versions/1/pin")).status_code == 400
    assert (await world.call("GET", "sql", "/versions/1")).json()["pinned"] is False


async def test_a_fresh_engine_is_told_every_pin_that_it_can_keep(world: RegistryWorld) -> None:
    digests = [(await world.upload(name, adapter_files(seed=ord(name)))).json()["digest"] for name in "abc"]
    for name in "ab":
        await world.call("PUT", name, "/versions/1/pin")
    world.engine.pinned.clear()  # as after a crash
    world.engine.failure = EngineDeadError("dead")
    await world.registry.repin()
    world.engine.failure = None
    await world.registry.repin()
    assert world.engine.pinned == set(digests[:2])


async def test_unpinning_while_no_engine_runs_is_kept(world: RegistryWorld) -> None:
    await world.upload("sql")
    await world.call("PUT", "sql", "/versions/1/pin")
    world.engine.failure = EngineDeadError("dead")
    assert (await world.call("DELETE", "sql", "/versions/1/pin")).status_code == 204
    world.engine.failure = None
    world.engine.pinned.clear()
    await world.registry.repin()
    assert world.engine.pinned == set()


async def test_equal_bytes_of_two_tenants_stay_pinned_until_neither_pins_them(world: RegistryWorld) -> None:
    _, headers = await world.other_tenant("stranger")
    digest = (await world.upload("sql")).json()["digest"]
    await world.upload("sql", tenant="stranger", headers=headers)
    await world.call("PUT", "sql", "/versions/1/pin")
    theirs = world.url("sql", "/versions/1/pin", tenant="stranger")
    await world.client.put(theirs, headers=headers)
    await world.call("DELETE", "sql", "/versions/1/pin")
    assert world.engine.pinned == {digest}
    assert (await world.call("POST", "sql", "/versions/1/unload")).status_code == 204
    assert digest in world.engine.resident, "they are the other tenant's too"
    await world.client.delete(theirs, headers=headers)
    assert world.engine.pinned == set()


async def test_a_load_during_a_deletion_is_a_404_and_leaves_nothing_resident(world: RegistryWorld) -> None:
    await world.upload("sql")
    deleted, loaded = await asyncio.gather(world.call("DELETE", "sql"), world.call("POST", "sql", "/versions/1/load"))
    assert deleted.status_code == 204
    assert loaded.status_code in (204, 404)
    await world.registry.wait_removed()
    assert world.engine.resident == set()
