"""A registry's world whose engine computes, on a tiny checkpoint."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex.engine.config import EngineConfig
from loraplex.engine.frontend.inprocess import InProcessEngineClient
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.outputs import RequestOutput
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.adapters.naming import parse_adapter_name
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.storage.engine_source import create_source
from tests.platform.adapters.helpers import RegistryWorld, open_platform, open_registry

L70 = [(i * 7 + 3) % 120 + 3 for i in range(70)]
NUM_CACHED = 64  # whole blocks of L70


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

    async def ask(self, name: str | None, *, tenant: TenantContext | None = None, max_tokens: int = 3) -> Answer:
        outputs = [output async for output in self.stream(name, tenant=tenant, max_tokens=max_tokens)]
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
