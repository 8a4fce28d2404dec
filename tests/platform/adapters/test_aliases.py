"""Aliases move traffic, and nothing else does."""

from __future__ import annotations

import asyncio

import pytest

from loraplex.platform.adapters.naming import parse_adapter_name
from tests.platform.adapters.helpers import RegistryWorld, adapter_files


@pytest.fixture
async def two_versions(world: RegistryWorld) -> RegistryWorld:
    for seed in (1, 2):
        await world.upload("sql", adapter_files(seed=seed))
    return world


async def answers(world: RegistryWorld, name: str) -> int:
    """The version that answers to `name`."""
    resolved = await world.registry.resolve(world.tenant, [parse_adapter_name(name)])
    return resolved.adapters[0].version


async def test_a_bare_name_stays_until_default_is_moved(two_versions: RegistryWorld) -> None:
    assert [await answers(two_versions, name) for name in ("sql", "sql@latest", "sql@2")] == [1, 2, 2]
    reply = await two_versions.call("PUT", "sql", "/aliases/default", json={"version": 2})
    assert reply.status_code == 200
    assert await answers(two_versions, "sql") == 2


async def test_an_alias_is_made_moved_and_deleted(two_versions: RegistryWorld) -> None:
    targets = {"targets": [{"version": 2, "weight": 100}]}
    assert (await two_versions.call("PUT", "sql", "/aliases/prod", json=targets)).json()["version"] == 2
    assert await answers(two_versions, "sql@prod") == 2
    await two_versions.call("PUT", "sql", "/aliases/prod", json={"version": 1})
    assert await answers(two_versions, "sql@prod") == 1
    listed = (await two_versions.call("GET", "sql", "/aliases")).json()["data"]
    assert [(alias["alias"], alias["version"]) for alias in listed] == [("default", 1), ("prod", 1)]
    assert (await two_versions.call("DELETE", "sql", "/aliases/prod")).status_code == 204
    assert (await two_versions.call("GET", "sql", "/aliases/prod")).status_code == 404


async def test_of_concurrent_changes_with_one_etag_one_wins(two_versions: RegistryWorld) -> None:
    etag = (await two_versions.call("GET", "sql", "/aliases/default")).headers["etag"]
    replies = await asyncio.gather(
        *(
            two_versions.client.put(
                two_versions.url("sql", "/aliases/default"),
                json={"version": version},
                headers=two_versions.headers | {"if-match": etag},
            )
            for version in (1, 2, 1, 2)
        )
    )
    assert sorted(reply.status_code for reply in replies) == [200, 409, 409, 409]
    winner = next(reply for reply in replies if reply.status_code == 200)
    assert {reply.json()["error"]["code"] for reply in replies if reply is not winner} == {"etag_mismatch"}
    now = await two_versions.call("GET", "sql", "/aliases/default")
    assert (now.headers["etag"], now.json()["version"]) == (winner.headers["etag"], winner.json()["version"])
    assert now.headers["etag"] != etag


@pytest.mark.parametrize(
    ("alias", "body", "status"),
    [
        ("latest", {"version": 1}, 400),
        ("Prod", {"version": 1}, 400),
        ("a" * 33, {"version": 1}, 400),
        ("prod", {"version": 9}, 404),
        ("prod", {}, 400),
        ("prod", {"version": 1, "targets": [{"version": 1}]}, 400),
        ("prod", {"targets": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}, 400),
        ("prod", {"version": 1, "weight": 3}, 400),
    ],
)
async def test_an_alias_that_cannot_be_is_refused(
    two_versions: RegistryWorld, alias: str, body: dict[str, object], status: int
) -> None:
    reply = await two_versions.call("PUT", "sql", f"/aliases/{alias}", json=body)
    assert reply.status_code == status
    assert (await two_versions.call("GET", "sql")).json()["aliases"] == {"default": 1}


@pytest.mark.parametrize("alias", ["default", "latest"])
async def test_reserved_aliases_are_never_deleted(two_versions: RegistryWorld, alias: str) -> None:
    assert (await two_versions.call("DELETE", "sql", f"/aliases/{alias}")).status_code == 400
    assert await answers(two_versions, f"sql@{alias}") in (1, 2)


@pytest.mark.parametrize("version", ["1", True, 1.0])
async def test_a_version_is_a_number_and_nothing_that_could_be_one(
    two_versions: RegistryWorld, version: object
) -> None:
    reply = await two_versions.call("PUT", "sql", "/aliases/prod", json={"version": version})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "version")


@pytest.mark.parametrize("body", [{}, {"version": 1, "targets": [{"version": 1}]}])
async def test_an_alias_without_one_target_is_told_what_it_needs(
    two_versions: RegistryWorld, body: dict[str, object]
) -> None:
    reply = await two_versions.call("PUT", "sql", "/aliases/prod", json=body)
    assert reply.json()["error"]["message"] == "give either version or targets"


@pytest.mark.parametrize("version", ["+1", "1.0", "%201", "01", "1_0", "0"])
async def test_a_version_in_a_path_is_written_in_one_way(two_versions: RegistryWorld, version: str) -> None:
    assert (await two_versions.call("GET", "sql", f"/versions/{version}")).status_code == 400
