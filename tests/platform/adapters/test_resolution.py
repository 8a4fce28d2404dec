"""From names to a selection: from memory, within the tenant, never the base by mistake."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import AdapterRef, LoraSelection, SelectionPart
from loraplex.engine.errors import ConfigurationError
from loraplex.platform.adapters.naming import parse_adapter_name
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.errors import ConflictError, NotFoundError
from tests.platform.adapters.helpers import (
    BASE,
    RecordingEngine,
    RegistryWorld,
    adapter_files,
    engine_info,
    open_platform,
    open_registry,
)
from tests.platform.adapters.test_naming import HOSTILE_NAMES


async def test_a_mix_becomes_one_selection_and_names_its_versions(world: RegistryWorld) -> None:
    digests = {
        name: (await world.upload(name, adapter_files(seed=seed))).json()["digest"] for seed, name in enumerate("ab")
    }
    resolved = await world.registry.resolve(
        world.tenant, [RequestedAdapter(name="a", weight=0.5), RequestedAdapter(name="b", version=1, weight=-2.0)]
    )
    assert [(one.label, one.digest, one.weight) for one in resolved.adapters] == [
        ("a@1", digests["a"], 0.5),
        ("b@1", digests["b"], -2.0),
    ]
    assert resolved.selection == LoraSelection.of(
        [SelectionPart(AdapterRef(digests["a"], 1, 1), 0.5), SelectionPart(AdapterRef(digests["b"], 1, 1), -2.0)]
    )


async def test_nothing_requested_is_the_base(world: RegistryWorld) -> None:
    resolved = await world.registry.resolve(world.tenant, [])
    assert resolved.selection.is_base
    assert resolved.adapters == ()


async def test_a_known_name_needs_no_sql(world: RegistryWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.upload("sql")

    def fail(*_: object) -> None:
        raise AssertionError("SQL was asked")

    monkeypatch.setattr(world.base.installation.database, "session", fail)
    monkeypatch.setattr(world.base.installation.database, "read_session", fail)
    for _ in range(10):
        await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])


@pytest.mark.parametrize("weight", [float("nan"), float("inf"), 10.01, -1e9])
async def test_a_weight_out_of_bounds_is_refused(world: RegistryWorld, weight: float) -> None:
    await world.upload("sql")
    with pytest.raises(InvalidRequestError, match="between -10 and 10"):
        await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql", weight=weight)])


async def test_a_version_twice_in_a_mix_is_refused_however_it_is_called(world: RegistryWorld) -> None:
    await world.upload("sql")
    with pytest.raises(InvalidRequestError, match="sql@1 twice"):
        await world.registry.resolve(
            world.tenant, [RequestedAdapter(name="sql"), RequestedAdapter(name="sql", version=1)]
        )


async def test_a_mix_has_at_most_eight_parts(world: RegistryWorld) -> None:
    with pytest.raises(InvalidRequestError, match="at most 8"):
        await world.registry.resolve(world.tenant, [RequestedAdapter(name=f"a{number}") for number in range(9)])


async def test_another_tenants_name_costs_as_many_queries_as_one_that_is_nowhere(world: RegistryWorld) -> None:
    """Whoever measures learns nothing: not at the first look, and not when it was looked for before."""
    await world.upload("sql")
    await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])  # in memory, for its owner
    stranger, _ = await world.other_tenant("stranger")
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    event.listen(world.base.installation.database._engine.sync_engine, "before_cursor_execute", record)
    asked = []
    for name in ("sql", "xyz", "sql", "xyz"):
        statements.clear()
        with pytest.raises(NotFoundError):
            await world.registry.resolve(stranger, [RequestedAdapter(name=name)])
        asked.append(list(statements))
    assert asked[0] != []
    assert asked[0] == asked[1] == asked[2] == asked[3]


@pytest.mark.parametrize("asked", ["sql", "sql@1", "sql@default", "sql@latest", "sql@prod"])
async def test_another_tenants_adapter_looks_like_one_that_does_not_exist(world: RegistryWorld, asked: str) -> None:
    await world.upload("sql")
    await world.call("PUT", "sql", "/aliases/prod", json={"version": 1})
    stranger, headers = await world.other_tenant("stranger")
    messages = []
    for name in (asked, asked.replace("sql", "xyz")):
        with pytest.raises(NotFoundError) as caught:
            await world.registry.resolve(stranger, [parse_adapter_name(name)])
        messages.append(caught.value.message.replace("xyz", "sql"))
    assert messages[0] == messages[1]
    foreign = await world.client.get(world.url("sql"), headers=headers)
    nowhere = await world.client.get(world.url("sql", tenant="nobody"), headers=headers)
    assert (foreign.status_code, foreign.json()) == (404, nowhere.json())


async def test_two_tenants_may_use_one_name_for_different_weights(world: RegistryWorld) -> None:
    stranger, headers = await world.other_tenant("stranger")
    await world.upload("sql", adapter_files(seed=1))
    await world.upload("sql", adapter_files(seed=2), tenant="stranger", headers=headers)
    ours, theirs = [
        (await world.registry.resolve(tenant, [RequestedAdapter(name="sql")])).selection
        for tenant in (world.tenant, stranger)
    ]
    assert ours.digest != theirs.digest
    assert [adapter.name for adapter in await world.registry.list_for_tenant(stranger)] == ["sql"]


@pytest.mark.parametrize("change", ["new version", "delete and recreate"])
async def test_other_weights_under_an_old_name_have_another_digest(world: RegistryWorld, change: str) -> None:
    await world.upload("sql", adapter_files(seed=1))
    before = await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])
    if change == "delete and recreate":
        await world.call("DELETE", "sql")
    await world.upload("sql", adapter_files(seed=2))
    after = await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql", alias="latest")])
    assert after.selection.digest != before.selection.digest
    assert after.adapters[0].version == 2


async def test_no_name_opens_a_file(world: RegistryWorld) -> None:
    await world.upload("sql")
    opened = _watch_opens(world.data_dir)
    for name in HOSTILE_NAMES:
        with pytest.raises(NotFoundError):
            await world.registry.resolve(world.tenant, [RequestedAdapter(name=name)])
        with pytest.raises(NotFoundError):
            await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql", alias=name or "x")])
    for name in ("..%2f..%2fetc", "%2fetc", "a%00b", "A", "x" * 64):
        for method, rest in (("GET", ""), ("DELETE", ""), ("POST", "/versions/1/load"), ("GET", "/versions/1")):
            reply = await world.client.request(method, world.url(name, rest), headers=world.headers)
            assert reply.status_code in (400, 404, 405)
    assert [path for path in opened if "loraplex.db" not in path] == []
    (world.data_dir / "control").write_bytes(b"")
    assert opened[-1].endswith("control"), "the hook sees what is opened"


async def test_a_version_of_another_base_is_a_409(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql")
        async with open_registry(base, tmp_path, base=replace(BASE, digest="cd" * 32)) as world:
            with pytest.raises(ConflictError, match="another base"):
                await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])
            assert (await world.call("POST", "sql", "/versions/1/load")).status_code == 409


@pytest.mark.parametrize(
    ("server", "numbers"),
    [
        ({"max_lora_rank": 8}, ("rank 16", "up to 8")),
        ({"slot_rank": 4, "num_slots": 3}, ("needs 4", "has 3")),
    ],
)
async def test_a_version_that_no_longer_fits_is_a_409_with_the_numbers(
    tmp_path: Path, server: dict[str, Any], numbers: tuple[str, str]
) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql", adapter_files(rank=16, targets=("down_proj",)))
        async with open_registry(base, tmp_path, engine=RecordingEngine(info=engine_info(**server))) as world:
            with pytest.raises(ConflictError) as caught:
                await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])
            assert all(number in caught.value.message for number in numbers)


async def test_slots_are_counted_anew_when_their_size_changes(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql", adapter_files(rank=12))
        async with open_registry(base, tmp_path, engine=RecordingEngine(info=engine_info(slot_rank=4))) as world:
            selection = (await world.registry.resolve(world.tenant, [RequestedAdapter(name="sql")])).selection
            assert (selection.num_attention_slots, selection.num_mlp_slots) == (3, 3)


async def test_a_server_does_not_start_under_the_name_of_an_adapter(tmp_path: Path) -> None:
    async with open_platform(tmp_path) as base:
        async with open_registry(base, tmp_path) as world:
            await world.upload("sql")
        with pytest.raises(ConfigurationError, match="acme"):
            async with open_registry(base, tmp_path, served_model_name="sql"):
                pass


def _watch_opens(folder: Path) -> list[str]:
    """Paths opened from now on in this process: of adapters' names, none may be among them."""
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and not str(arguments[0]).endswith((".py", ".pyc", ".so")):
            opened.append(str(arguments[0]))

    sys.addaudithook(hook)  # for the rest of the process; it only appends to a list
    return opened
