"""Load, unload, pin and generate in a crowd and many times over, on a real engine."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import pytest

from loraplex.adapters.source import AdapterSource
from loraplex.engine.build import build_engine_core
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.frontend import inprocess
from loraplex.engine.messages import EngineInfo
from tests.platform.adapters.serving import Answer, Serving, serving


@dataclass(frozen=True)
class Call:
    """One acknowledged call, with its place in the order of all beginnings and ends."""

    name: str
    action: str
    start: int
    end: int


async def upload_all(served: Serving, adapters: list[dict[str, bytes]], names: str) -> dict[str, str]:
    """Name -> digest."""
    replies = {name: await served.world.upload(name, files) for name, files in zip(names, adapters, strict=False)}
    return {name: reply.json()["digest"] for name, reply in replies.items()}


def assert_same(answer: Answer, quiet: Answer) -> None:
    assert answer.last.error is None
    assert answer.logprobs == pytest.approx(quiet.logprobs, abs=1e-4)


async def test_a_hundred_random_calls_of_sixteen_tasks_end_in_the_last_acknowledged_state(
    served: Serving, adapters: list[dict[str, bytes]]
) -> None:
    digests = await upload_all(served, adapters, "abc")
    quiet = {name: await served.ask(name) for name in "abc"}
    dice, clock = random.Random(11), itertools.count()
    calls: list[Call] = []

    async def call(name: str, action: str) -> None:
        start = next(clock)
        if action == "generate":
            assert_same(await served.ask(name), quiet[name])
        else:
            assert (await served.world.call("POST", name, f"/versions/1/{action}")).status_code == 204
        calls.append(Call(name, action, start, next(clock)))

    async def work(plan: list[tuple[str, str]]) -> None:
        for name, action in plan:
            await call(name, action)

    plan = [(dice.choice("abc"), dice.choice(("load", "unload", "generate"))) for _ in range(100)]
    await asyncio.gather(*(work(plan[task::16]) for task in range(16)))
    assert len(calls) == 100

    for name, digest in digests.items():
        own = [one for one in calls if one.name == name]
        last = [one for one in own if not any(other.start > one.end for other in own)]  # any of these may be the last
        outcomes = {one.action != "unload" for one in last}
        if len(outcomes) == 1:
            while (digest in served.resident) not in outcomes:  # the gauges follow some steps later
                await asyncio.sleep(0.01)
    for action, expected in (("load", set(digests.values())), ("unload", set())):
        await work([(name, action) for name in "abc"])
        await served.wait_resident(expected)
    assert len(served.world.registry.residency._lock) == 0
    report = await served.engine.integrity()
    assert (report.num_requests, report.num_leases, report.num_references, report.faults) == (0, 0, 0, ())


async def test_loads_in_a_loop_change_no_running_answer(
    tmp_path: Path, checkpoint: Path, adapters: list[dict[str, bytes]]
) -> None:
    async with serving(tmp_path, checkpoint, adapter_slots=2) as served:
        await upload_all(served, adapters, "abcd")
        quiet = [await served.ask(name, max_tokens=64) for name in "ab"]
        streams = [asyncio.create_task(served.ask(name, max_tokens=64)) for name in "ab"]
        statuses = []
        while not all(stream.done() for stream in streams):
            for name in "cd":
                statuses.append((await served.world.call("POST", name, "/versions/1/load")).status_code)
        for stream, alone in zip(streams, quiet, strict=True):
            assert_same(await stream, alone)
            assert len(alone.token_ids) == 64
        assert 503 in statuses, "a load met two leased slots"
        assert (await served.world.call("POST", "c", "/versions/1/load")).status_code == 204


async def test_of_more_adapters_than_slots_an_unloaded_one_is_gone_and_comes_back_once(
    tmp_path: Path, checkpoint: Path, adapters: list[dict[str, bytes]]
) -> None:
    async with serving(tmp_path, checkpoint, adapter_slots=2) as served:
        digests = await upload_all(served, adapters, "abc")
        for name in "abc":
            assert (await served.world.call("POST", name, "/versions/1/load")).status_code == 204
        await served.wait_resident({digests["b"], digests["c"]})
        assert (await served.world.call("POST", "b", "/versions/1/unload")).status_code == 204
        await served.wait_resident({digests["c"]})
        assert served.engine.stats.num_attention_slots_used == 1
        assert (await served.world.call("POST", "b", "/versions/1/load")).status_code == 204
        await served.wait_resident({digests["b"], digests["c"]})
        assert served.engine.stats.num_attention_slots_used == 2


async def test_tables_do_not_grow_over_reloads(
    tmp_path: Path, checkpoint: Path, adapters: list[dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cores: list[EngineCore] = []

    def build(config: EngineConfig, source: AdapterSource) -> tuple[EngineCore, EngineInfo]:
        core, info = build_engine_core(config, source)
        cores.append(core)
        return core, info

    monkeypatch.setattr(inprocess, "build_engine_core", build)
    names = "abcdefghij"
    async with serving(tmp_path, checkpoint, adapter_slots=4) as served:
        await upload_all(served, [with_alpha(adapters[0], alpha) for alpha in range(1, 11)], names)
        sizes = []
        for round_number in range(5):
            for name in names:
                for action in ("load", "unload"):
                    assert (await served.world.call("POST", name, f"/versions/1/{action}")).status_code == 204
                    await served.ask(name)
            for name in names:
                await served.world.call("POST", name, "/versions/1/unload")
            await use_up(served, with_alpha(adapters[1], 100 + round_number))
            await served.wait_resident(set())
            sizes.append(num_entries(cores[0], served.world.registry, served.engine))
        assert sizes[2:] == [sizes[1]] * 3


async def use_up(served: Serving, files: dict[str, bytes]) -> None:
    """Upload, pin, use and delete weights that nobody has seen before."""
    assert (await served.world.upload("brief", files)).status_code == 201
    number = (await served.world.call("GET", "brief")).json()["latest_version"]
    for method in ("PUT", "DELETE"):
        assert (await served.world.call(method, "brief", f"/versions/{number}/pin")).status_code == 204
    await served.ask("brief@latest")
    assert (await served.world.call("DELETE", "brief")).status_code == 204
    await served.world.registry.wait_removed()


def with_alpha(files: dict[str, bytes], alpha: int) -> dict[str, bytes]:
    config = json.loads(files["adapter_config.json"]) | {"lora_alpha": alpha}
    return files | {"adapter_config.json": json.dumps(config).encode()}


def num_entries(*roots: object) -> int:
    """Entries of all tables that these reach through our own objects."""
    seen: set[int] = set()
    todo, total = list(roots), 0
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            total += len(one)
        elif not type(one).__module__.startswith("loraplex."):
            continue
        todo += gc.get_referents(one)
    return total
