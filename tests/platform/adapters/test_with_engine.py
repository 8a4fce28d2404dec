"""The registry, the store and a real engine together, on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from loraplex.engine.config import EngineConfig
from loraplex.engine.frontend.inprocess import InProcessEngineClient
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.outputs import FinishReason, RequestOutput
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.adapters.naming import parse_adapter_name
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.errors import NotFoundError
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.storage.engine_source import create_source
from tests.helpers import make_adapter, make_checkpoint
from tests.platform.adapters.helpers import RegistryWorld, open_platform, open_registry

L70 = [(i * 7 + 3) % 120 + 3 for i in range(70)]
NUM_CACHED = 64  # whole blocks of L70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, bytes]]:
    """The files of four adapters with different weights; the second is rsLoRA."""
    folders = [
        make_adapter(tmp_path_factory.mktemp("adapter"), checkpoint, seed=seed, use_rslora=seed == 1)
        for seed in range(4)
    ]
    return [{path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} for folder in folders]


@dataclass
class Answer:
    token_ids: list[int]
    logprobs: list[float]
    num_cached_tokens: int
    last: RequestOutput


class Serving:
    """A registry's world whose engine computes."""

    def __init__(self, world: RegistryWorld, engine: InProcessEngineClient) -> None:
        self.world = world
        self.engine = engine
        self._ids = itertools.count()

    async def stream(
        self, name: str | None, *, tenant: TenantContext | None = None, max_tokens: int = 3
    ) -> AsyncIterator[RequestOutput]:
        tenant = tenant or self.world.tenant
        requested = [] if name is None else [parse_adapter_name(name)]
        resolved = await self.world.registry.resolve(tenant, requested)
        request = GenerateRequest(
            request_id=str(next(self._ids)),
            prompt_token_ids=L70,
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=1, ignore_eos=True),
            selection=resolved.selection,
            tenant_id=tenant.id,
            cache_salt=tenant.cache_salt,
        )
        async with self.world.registry.hold(resolved), aclosing(self.engine.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def ask(self, name: str | None, *, tenant: TenantContext | None = None) -> Answer:
        outputs = [output async for output in self.stream(name, tenant=tenant)]
        return Answer(
            token_ids=[token for output in outputs for token in output.new_token_ids],
            logprobs=[one.logprob for output in outputs for one in output.new_logprobs],
            num_cached_tokens=max(output.num_cached_tokens for output in outputs),
            last=outputs[-1],
        )

    @property
    def resident(self) -> set[str]:
        return {one.digest for one in self.engine.stats.resident}

    async def wait_resident(self, digests: set[str]) -> None:
        """Return when the gauges, which follow some steps later, show just these."""
        while self.resident != digests:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(data_dir: Path, checkpoint: Path, **config: Any) -> AsyncIterator[Serving]:
    settings: dict[str, Any] = {"adapter_slots": 8, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1}
    store = ArtifactStore((data_dir / "store").as_uri(), cache_dir=data_dir / "cache")
    engine_config = EngineConfig(model=str(checkpoint), dtype="float32", **(settings | config))
    engine = InProcessEngineClient(engine_config, create_source(**store.source_options))
    await engine.start()
    try:
        async with (
            open_platform(data_dir) as platform,
            open_registry(
                platform, data_dir, engine=engine, base=build_base_spec(checkpoint), max_upload_bytes=8 << 20
            ) as world,
        ):
            yield Serving(world, engine)
    finally:
        await engine.stop()


@pytest.fixture
async def served(tmp_path: Path, checkpoint: Path) -> AsyncIterator[Serving]:
    async with serving(tmp_path, checkpoint) as opened:
        yield opened


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
    num_tokens, last = 0, None
    async for output in served.stream("sql", max_tokens=64):
        num_tokens += len(output.new_token_ids)
        last = output
        if num_tokens == 5:
            assert (await served.world.call("DELETE", "sql")).status_code == 204
        if num_tokens == 6:
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
    answer = await served.ask("lost")
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
