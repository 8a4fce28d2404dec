"""The registry's SQL on PostgreSQL: the same life of an adapter as on SQLite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loraplex.platform.adapters.resolution import RequestedAdapter
from tests.platform.adapters.helpers import RegistryWorld, adapter_files, open_world


@pytest.fixture
async def world(tmp_path: Path, postgres_url: str) -> AsyncIterator[RegistryWorld]:
    async with open_world(tmp_path, database_url=postgres_url, secret_key="secret-of-the-tests-" * 2) as opened:
        yield opened


async def test_an_adapter_lives_and_ends(world: RegistryWorld) -> None:
    replies = await asyncio.gather(*(world.upload("sql", adapter_files(seed=seed)) for seed in range(8)))
    assert sorted(reply.json()["version"] for reply in replies) == list(range(1, 9))
    adapter = (await world.call("GET", "sql")).json()
    assert adapter["versions"] == list(range(1, 9))
    assert len(adapter["aliases"]) == 1
    assert (await world.call("PUT", "sql", "/aliases/prod", json={"version": 8})).status_code == 200
    assert (await world.call("PUT", "sql", "/aliases/default", json={"version": 7})).status_code == 200
    assert (await world.call("PUT", "sql", "/versions/7/pin")).status_code == 204
    assert (await world.call("DELETE", "sql", "/versions/8")).status_code == 409
    assert (await world.call("DELETE", "sql", "/versions/1")).status_code == 204
    await world.registry.wait_removed()
    await world.registry.repin()
    resolved = await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])
    assert resolved.adapters[0].version == 7
    assert [adapter.version for adapter in await world.registry.list_for_tenant(world.tenant)] == [7]
    assert (await world.call("DELETE", "sql")).status_code == 204
    await world.registry.wait_removed()
    assert world.stored_objects() == []
    assert (await world.upload("sql")).json()["version"] == 9
    for name in ("a%00b", "A", "x" * 64):
        assert (await world.call("GET", name)).status_code == 404
        assert (await world.call("GET", "sql", f"/aliases/{name}")).status_code == 404
    await world.registry.remove_tenant(world.tenant.id)
    assert world.stored_objects() == []
