"""The registry, the store and a real engine together, on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.outputs import FinishReason
from loraplex.platform.errors import NotFoundError
from tests.platform.adapters.serving import NUM_CACHED, Serving, serving


async def test_two_tenants_adapters_of_one_name_share_no_prefix(
    served: Serving, adapters: list[dict[str, bytes]]
) -> None:
    stranger, headers = await served.world.other_tenant("stranger")
    await served.world.upload("sql", adapters[0])
    await served.world.upload("sql", adapters[1], tenant="stranger", headers=headers)
    ours, theirs = await served.ask("sql"), await served.ask("sql", tenant=stranger)
    assert (ours.num_cached_tokens, theirs.num_cached_tokens) == (0, 0)
    assert ours.logprobs != pytest.approx(theirs.logprobs, abs=1e-3)
    again = await served.ask("sql")
    assert again.num_cached_tokens == NUM_CACHED, "the cache works where it may"
    assert again.logprobs == pytest.approx(ours.logprobs, abs=1e-4)


@pytest.mark.parametrize("change", ["new version", "delete and recreate"])
async def test_other_weights_under_an_old_name_reuse_nothing(
    served: Serving, adapters: list[dict[str, bytes]], change: str
) -> None:
    stranger, headers = await served.world.other_tenant("stranger")
    await served.world.upload("sql", adapters[0])
    await served.world.upload("cold", adapters[1], tenant="stranger", headers=headers)
    before, cold = await served.ask("sql"), await served.ask("cold", tenant=stranger)
    if change == "delete and recreate":
        await served.world.call("DELETE", "sql")
        await served.world.registry.wait_removed()
    await served.world.upload("sql", adapters[1])
    after = await served.ask("sql@latest")
    assert after.num_cached_tokens == 0
    assert after.logprobs == pytest.approx(cold.logprobs, abs=1e-4)
    assert after.logprobs != pytest.approx(before.logprobs, abs=1e-3)


async def test_a_deletion_lets_the_running_request_finish_and_then_frees_everything(
    served: Serving, adapters: list[dict[str, bytes]]
) -> None:
    await served.world.upload("sql", adapters[0])
    num_tokens, last, is_deleted = 0, None, False
    async for output in served.stream("sql", max_tokens=64):
        num_tokens += len(output.new_token_ids)
        last = output
        if num_tokens >= 5 and not is_deleted:
            assert num_tokens < 64
            assert (await served.world.call("DELETE", "sql")).status_code == 204
            is_deleted = True
            with pytest.raises(NotFoundError):
                await served.ask("sql")
    assert last is not None
    assert (num_tokens, last.finish_reason) == (64, FinishReason.LENGTH)
    await served.world.registry.wait_removed()
    await served.wait_resident(set())
    assert served.world.stored_objects() == []
    assert list((served.world.data_dir / "cache").iterdir()) == []
    report = await served.engine.integrity()
    assert (report.num_leases, report.num_references, report.num_blocks_in_use, report.faults) == (0, 0, 0, ())


async def test_unload_frees_and_load_brings_back(served: Serving, adapters: list[dict[str, bytes]]) -> None:
    digests = [
        (await served.world.upload(name, files)).json()["digest"] for name, files in zip("abc", adapters, strict=False)
    ]
    for name in "abc":
        assert (await served.world.call("POST", name, "/versions/1/load")).status_code == 204
    await served.wait_resident(set(digests))
    assert (await served.world.call("POST", "b", "/versions/1/unload")).status_code == 204
    await served.wait_resident({digests[0], digests[2]})
    assert (await served.world.call("POST", "b", "/versions/1/load")).status_code == 204
    await served.wait_resident(set(digests))


async def test_a_resident_version_opens_no_file(served: Serving, adapters: list[dict[str, bytes]]) -> None:
    await served.world.upload("sql", adapters[0])
    await served.world.upload("sql", adapters[1])
    await served.ask("sql@2")
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith((f"{folder}/store", f"{folder}/cache")):
            opened.append(str(arguments[0]))

    folder = served.world.data_dir
    sys.addaudithook(hook)
    for _ in range(10):
        await served.ask("sql@2")
    assert opened == []
    await served.ask("sql@1")
    assert opened != [], "the hook sees a load"


async def test_files_that_vanish_fail_their_adapter_only(served: Serving, adapters: list[dict[str, bytes]]) -> None:
    await served.world.upload("lost", adapters[0])
    await served.world.upload("kept", adapters[1])
    kept, base = await served.ask("kept"), await served.ask(None)
    await served.ask("lost")
    await served.world.call("POST", "lost", "/versions/1/unload")
    for folder in ("store", "cache"):
        shutil.rmtree(served.world.data_dir / folder)
    crowd = [served.ask("kept", max_tokens=24), served.ask(None, max_tokens=24), served.ask("lost")]
    kept_beside, base_beside, answer = await asyncio.gather(*crowd)
    assert kept_beside.logprobs[:3] == pytest.approx(kept.logprobs, abs=1e-4)
    assert base_beside.logprobs[:3] == pytest.approx(base.logprobs, abs=1e-4)
    assert (len(kept_beside.token_ids), len(base_beside.token_ids)) == (24, 24)
    assert answer.last.finish_reason is FinishReason.ERROR
    assert answer.last.error is not None
    assert answer.last.error.code == "adapter_load_failed"
    assert "missing from the store" in answer.last.error.message
    reply = await served.world.call("POST", "lost", "/versions/1/load")
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapter_load_failed")
    assert (await served.ask("kept")).logprobs == pytest.approx(kept.logprobs, abs=1e-4)
    assert (await served.ask(None)).logprobs == pytest.approx(base.logprobs, abs=1e-4)


async def test_a_pinned_version_is_no_victim(
    tmp_path: Path, checkpoint: Path, adapters: list[dict[str, bytes]]
) -> None:
    async with serving(tmp_path, checkpoint, adapter_slots=2) as served:
        digests = [
            (await served.world.upload(name, files)).json()["digest"]
            for name, files in zip("abcd", adapters, strict=True)
        ]
        assert (await served.world.call("PUT", "a", "/versions/1/pin")).status_code == 204
        for name in "bcdbcd":
            await served.ask(name)
        assert digests[0] in served.resident
        refused = await served.world.call("PUT", "b", "/versions/1/pin")
        assert refused.status_code == 400, "one slot stays free for everybody else"
        assert (await served.world.call("GET", "b", "/versions/1")).json()["pinned"] is False
