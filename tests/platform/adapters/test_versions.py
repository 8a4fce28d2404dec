"""Uploads become immutable, numbered versions, or nothing at all."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np
import pytest
import safetensors.numpy
from sqlalchemy import select

from loraplex.platform.db.models import AuditEvent
from loraplex.platform.errors import StorageError
from tests.platform.adapters.helpers import (
    RegistryWorld,
    adapter_files,
    engine_info,
    zipped,
)


async def test_upload_makes_the_adapter_and_its_first_ready_version(world: RegistryWorld) -> None:
    files = adapter_files(rank=12)
    reply = await world.upload("sql", files)
    assert reply.status_code == 201
    version = reply.json()
    assert (version["adapter"], version["version"], version["status"]) == ("sql", 1, "ready")
    assert (version["rank"], version["num_attention_slots"], version["num_mlp_slots"]) == (12, 2, 2)
    sha256 = {file["name"]: file["sha256"] for file in version["files"]}
    assert sha256 == {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert version["facts"]["target_modules"] == ["q_proj", "down_proj"]


async def test_folder_zip_field_and_raw_zip_make_the_same_version(world: RegistryWorld) -> None:
    files = adapter_files()
    url = world.url("sql", "/versions")
    replies = [
        await world.upload("sql", files),
        await world.upload("sql", {"adapter.zip": zipped(files)}),
        await world.client.post(
            url, content=zipped(files), headers={**world.headers, "content-type": "application/zip"}
        ),
    ]
    assert [reply.json()["version"] for reply in replies] == [1, 2, 3]
    assert len({reply.json()["digest"] for reply in replies}) == 1


async def test_company_of_an_adapter_is_left_out_and_told(world: RegistryWorld) -> None:
    reply = await world.upload("sql", adapter_files() | {"README.md": b"# mine", "training_log.txt": b"loss 0.1"})
    assert [file["name"] for file in reply.json()["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
    assert [warning for warning in reply.json()["facts"]["warnings"] if "training_log.txt" in warning]


async def test_a_new_version_moves_no_traffic(world: RegistryWorld) -> None:
    await world.upload("sql", adapter_files(seed=1))
    await world.upload("sql", adapter_files(seed=2))
    adapter = (await world.call("GET", "sql")).json()
    assert (adapter["versions"], adapter["latest_version"], adapter["aliases"]) == ([1, 2], 2, {"default": 1})


async def test_a_refusal_names_every_reason_and_leaves_nothing(world: RegistryWorld) -> None:
    files = adapter_files(rank=4, use_dora=True)
    tensors = safetensors.numpy.load(files["adapter_model.safetensors"])
    tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = np.zeros((4, 16), np.float32)
    reply = await world.upload("sql", files | {"adapter_model.safetensors": safetensors.numpy.save(tensors)})
    assert reply.status_code == 422
    reasons = reply.json()["error"]["reasons"]
    assert len(reasons) >= 2
    assert all(set(reason) == {"code", "message", "file", "tensor", "remedy"} for reason in reasons)
    await assert_nothing_is_left(world)


async def test_values_that_are_not_finite_are_refused(world: RegistryWorld) -> None:
    files = adapter_files()
    tensors = safetensors.numpy.load(files["adapter_model.safetensors"])
    name, tensor = next(iter(tensors.items()))
    tensors[name] = np.where(np.indices(tensor.shape).sum(0) == 0, np.float32("nan"), tensor)
    reply = await world.upload("sql", files | {"adapter_model.safetensors": safetensors.numpy.save(tensors)})
    assert reply.status_code == 422
    assert reply.json()["error"]["reasons"][0]["tensor"] == name
    await assert_nothing_is_left(world)


async def test_a_refused_upload_uses_no_version_number(world: RegistryWorld) -> None:
    await world.upload("sql")
    await world.upload("sql", adapter_files(use_dora=True))
    assert (await world.upload("sql", adapter_files(seed=2))).json()["version"] == 2


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "adapter_model.pt", "hook.py", "../adapter_config.json", "a.tar"]
)
async def test_files_that_must_not_be_there_refuse_the_upload_unseen(world: RegistryWorld, name: str) -> None:
    reply = await world.upload("sql", adapter_files() | {name: b"\x80\x04never read."})
    assert (reply.status_code, reply.json()["error"]["reasons"][0]["file"]) == (422, name)
    await assert_nothing_is_left(world)


async def test_a_rank_above_the_servers_is_refused_with_both_numbers(world: RegistryWorld) -> None:
    world.engine.info = engine_info(max_lora_rank=8)
    reply = await world.upload("sql", adapter_files(rank=16))
    assert reply.status_code == 422
    assert "16" in reply.json()["error"]["message"]
    assert "8" in reply.json()["error"]["message"]


async def test_concurrent_uploads_of_one_name_get_distinct_numbers(world: RegistryWorld) -> None:
    replies = await asyncio.gather(*(world.upload("sql", adapter_files(seed=seed)) for seed in range(16)))
    assert [reply.status_code for reply in replies] == [201] * 16
    assert sorted(reply.json()["version"] for reply in replies) == list(range(1, 17))
    first = next(reply for reply in replies if reply.json()["version"] == 1)
    listed = (await world.call("GET", "sql", "/versions")).json()["data"]
    assert [version["version"] for version in listed] == list(range(16, 0, -1))
    assert (await world.call("GET", "sql", "/versions/1")).json() == first.json()
    assert (await world.call("GET", "sql")).json()["aliases"]["default"] in range(1, 17)


async def test_numbers_go_on_after_delete_and_recreate(world: RegistryWorld) -> None:
    await world.upload("sql", adapter_files(seed=1))
    await world.upload("sql", adapter_files(seed=2))
    assert (await world.call("DELETE", "sql")).status_code == 204
    await world.registry.wait_removed()
    reply = await world.upload("sql", adapter_files(seed=3))
    assert reply.json()["version"] == 3
    assert (await world.call("GET", "sql")).json()["aliases"] == {"default": 3}


async def test_an_adapter_never_has_the_name_of_the_base(world: RegistryWorld) -> None:
    reply = await world.upload("tiny")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
    await assert_nothing_is_left(world)


async def test_an_upload_while_the_store_is_away_leaves_nothing(
    world: RegistryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StorageError("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(world.store, "put_version", fail)
        assert (await world.upload("sql")).status_code == 503
    await world.registry.wait_removed()
    await assert_nothing_is_left(world)
    assert (await world.upload("sql")).status_code == 201


async def test_adapters_and_versions_are_listed_in_pages(world: RegistryWorld) -> None:
    for name in ("c", "a", "b"):
        await world.upload(name)
    collection = "/api/v1/tenants/acme/adapters"
    first = (await world.client.get(f"{collection}?limit=2", headers=world.headers)).json()
    rest = (await world.client.get(f"{collection}?limit=2&after=b", headers=world.headers)).json()
    assert ([entry["name"] for entry in first["data"]], first["has_more"]) == (["a", "b"], True)
    assert ([entry["name"] for entry in rest["data"]], rest["has_more"]) == (["c"], False)


async def test_every_change_is_in_the_audit(world: RegistryWorld) -> None:
    await world.upload("sql")
    await world.call("PUT", "sql", "/aliases/prod", json={"version": 1})
    await world.call("PUT", "sql", "/versions/1/pin")
    await world.call("DELETE", "sql", "/versions/1/pin")
    await world.call("POST", "sql", "/versions/1/load")
    await world.call("POST", "sql", "/versions/1/unload")
    await world.call("DELETE", "sql", "/aliases/prod")
    await world.call("DELETE", "sql")
    async with world.base.installation.database.read_session() as session:
        query = select(AuditEvent.action).where(AuditEvent.action.startswith("adapter")).order_by(AuditEvent.id)
        actions = list(await session.scalars(query))
    assert actions == [
        "adapter.version.create",
        "adapter.alias.put",
        "adapter.pin",
        "adapter.unpin",
        "adapter.load",
        "adapter.unload",
        "adapter.alias.delete",
        "adapter.delete",
    ]


async def assert_nothing_is_left(world: RegistryWorld) -> None:
    listed = await world.client.get("/api/v1/tenants/acme/adapters", headers=world.headers)
    assert listed.json()["data"] == []
    assert world.stored_objects() == []
    assert world.temporary_files() == []
