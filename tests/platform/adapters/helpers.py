"""Worlds for the registry's tests: real layers, routes, SQLite and store; small adapters without torch."""

from __future__ import annotations

import asyncio
import io
import json
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import safetensors.numpy

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.messages import EngineInfo, EngineStats, GenerateRequest, IntegrityReport, MemoryPlan
from loraplex.engine.outputs import RequestOutput
from loraplex.kernels.lora.metadata import Projection
from loraplex.platform.adapters import endpoints
from loraplex.platform.adapters.registry import AdapterRegistry
from loraplex.platform.api_keys.principal import Scope, TenantContext
from loraplex.platform.storage.artifact_store import ArtifactStore
from tests.platform.helpers import BaseWorld, open_base_world

SERVED_NAME = "tiny"
HIDDEN, INNER = 16, 32

BASE = BaseSpec(
    digest="ab" * 32,
    name="tiny-base",
    num_layers=2,
    hidden_size=HIDDEN,
    vocab_size=64,
    in_features={one: INNER if one is Projection.DOWN else HIDDEN for one in Projection},
    out_features={one: INNER if one in (Projection.GATE, Projection.UP) else HIDDEN for one in Projection},
    has_bias=dict.fromkeys(Projection, False),
    tie_word_embeddings=False,
)


def adapter_files(
    *, seed: int = 0, rank: int = 4, targets: tuple[str, ...] = ("q_proj", "down_proj"), **config: Any
) -> dict[str, bytes]:
    """A PEFT folder as name -> content, its values from `seed`."""
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for module in BASE.modules():
        if module.projection.module_name in targets:
            key = f"base_model.model.{module.path}"
            tensors[f"{key}.lora_A.weight"] = random.normal(size=(rank, module.in_features)).astype(np.float32)
            tensors[f"{key}.lora_B.weight"] = random.normal(size=(module.out_features, rank)).astype(np.float32)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(targets),
    }
    return {
        "adapter_config.json": json.dumps(settings | config).encode(),
        "adapter_model.safetensors": safetensors.numpy.save(tensors),
    }


def multipart(files: Mapping[str, bytes]) -> list[tuple[str, tuple[str, bytes, str]]]:
    return [("files", (name, content, "application/octet-stream")) for name, content in files.items()]


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def engine_info(**given: Any) -> EngineInfo:
    settings: dict[str, Any] = {
        "backend": "reference",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "block_size": 16,
        "num_blocks": 32,
        "num_slots": 8,
        "slot_rank": 8,
        "max_lora_rank": 64,
        "num_threads": 1,
        "vocab_size": 64,
        "memory": MemoryPlan(budget_bytes=0, weights_bytes=0, slots_bytes=0, peak_activation_bytes=0, kv_cache_bytes=0),
    }
    return EngineInfo(**(settings | given))


@dataclass
class RecordingEngine:
    """An engine's answers to adapter calls, without a model: what is resident and pinned, and what was called."""

    info: EngineInfo = field(default_factory=engine_info)
    state: EngineState = EngineState.READY
    stats: EngineStats = field(default_factory=EngineStats)
    resident: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    calls: list[tuple[str, str]] = field(default_factory=list)
    failure: LoraplexError | None = None

    async def load_adapter(self, ref: AdapterRef) -> None:
        await self._call("load", ref.digest)
        self.resident.add(ref.digest)

    async def unload_adapter(self, digest: str) -> None:
        await self._call("unload", digest)
        self.resident.discard(digest)

    async def pin_adapter(self, ref: AdapterRef) -> None:
        await self._call("pin", ref.digest)
        self.pinned.add(ref.digest)
        self.resident.add(ref.digest)

    async def unpin_adapter(self, digest: str) -> None:
        await self._call("unpin", digest)
        self.pinned.discard(digest)

    async def abort(self, request_ids: list[str]) -> None:
        raise AssertionError("the registry aborts nothing")

    async def integrity(self) -> IntegrityReport:
        raise AssertionError("the registry asks for no report")

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        raise AssertionError("the registry generates nothing")

    async def _call(self, name: str, digest: str) -> None:
        self.calls.append((name, digest))
        await asyncio.sleep(0)  # others run meanwhile, as with a real engine
        if self.failure is not None:
            raise self.failure


@dataclass(kw_only=True)
class RegistryWorld:
    base: BaseWorld
    registry: AdapterRegistry
    engine: RecordingEngine
    store: ArtifactStore
    data_dir: Path
    tenant: TenantContext
    headers: dict[str, str]  # a key of `tenant` with adapters:read and adapters:write

    @property
    def client(self) -> httpx.AsyncClient:
        return self.base.client

    async def other_tenant(self, name: str) -> tuple[TenantContext, dict[str, str]]:
        tenant = await self.base.tenant(name)
        return tenant, await self.base.key(Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE, tenant=tenant)

    def url(self, adapter: str, rest: str = "", *, tenant: str = "acme") -> str:
        return f"/api/v1/tenants/{tenant}/adapters/{adapter}{rest}"

    async def upload(
        self,
        adapter: str,
        files: Mapping[str, bytes] | None = None,
        *,
        tenant: str = "acme",
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        return await self.client.post(
            self.url(adapter, "/versions", tenant=tenant),
            files=multipart(adapter_files() if files is None else files),
            headers=headers or self.headers,
        )

    async def call(self, method: str, adapter: str, rest: str = "", **given: Any) -> httpx.Response:
        return await self.client.request(method, self.url(adapter, rest), headers=self.headers, **given)

    def stored_objects(self) -> list[str]:
        """Everything in the store's folder."""
        return sorted(path.name for path in (self.data_dir / "store").rglob("*") if path.is_file())

    def temporary_files(self) -> list[str]:
        """Whatever uploads left on disk, but for the locks of living processes."""
        files = (path for path in (self.data_dir / "uploads").rglob("*") if path.is_file())
        return sorted(path.name for path in files if path.name != "lock")


@asynccontextmanager
async def open_registry(platform: BaseWorld, data_dir: Path, **given: Any) -> AsyncIterator[RegistryWorld]:
    """A started registry on the world's database: what one server process has between start and stop."""
    engine = given.pop("engine", None) or RecordingEngine()
    store = ArtifactStore((data_dir / "store").as_uri(), cache_dir=data_dir / "cache")
    settings: dict[str, Any] = {
        "base": BASE,
        "served_model_name": SERVED_NAME,
        "slot_rank": engine.info.slot_rank,
        "max_upload_bytes": 1 << 20,
    }
    registry = AdapterRegistry(
        database=platform.installation.database,
        store=store,
        engine=engine,
        uploads_dir=data_dir / "uploads",
        **(settings | given),
    )
    platform.app.state.services.registry = registry
    await registry.start()
    try:
        tenant = await platform.installation.tenants.context("acme")
        headers = await platform.key(Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE, tenant=tenant)
        yield RegistryWorld(
            base=platform,
            registry=registry,
            engine=engine,
            store=store,
            data_dir=data_dir,
            tenant=tenant,
            headers=headers,
        )
    finally:
        await registry.aclose()


@asynccontextmanager
async def open_platform(data_dir: Path, **settings: Any) -> AsyncIterator[BaseWorld]:
    """Layers, routes and database with the tenant `acme`; `open_registry` starts a registry on it."""
    async with open_base_world(
        data_dir, add_routes=lambda app: app.include_router(endpoints.router), **settings
    ) as platform:
        if not await platform.installation.tenants.list(after=None, limit=1):
            await platform.tenant("acme")
        yield platform


@asynccontextmanager
async def open_world(
    data_dir: Path, *, max_upload_bytes: int = 1 << 20, **settings: Any
) -> AsyncIterator[RegistryWorld]:
    async with (
        open_platform(data_dir, **settings) as platform,
        open_registry(platform, data_dir, max_upload_bytes=max_upload_bytes) as world,
    ):
        yield world
