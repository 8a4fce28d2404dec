"""Opens everything that a server process needs, in the one safe order, and closes it again in reverse.

The engine process is started first and comes up beside the rest: it takes the longest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from loraplex.adapters.base_spec import BaseSpec
from loraplex.engine.frontend.engine_client import ProcessEngineClient
from loraplex.engine.frontend.generator import Generator
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.resolve import resolve_model
from loraplex.platform.adapters.registry import AdapterRegistry
from loraplex.platform.api_keys.bootstrap import bootstrap
from loraplex.platform.data_folder import make_data_folder
from loraplex.platform.db.session import Database
from loraplex.platform.installation import open_installation
from loraplex.platform.openai.running import RunningRequests
from loraplex.platform.services import Services
from loraplex.platform.settings import Settings
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.telemetry.metrics import Metrics
from loraplex.platform.usage.service import UsageService

SOURCE_FACTORY = "loraplex.platform.storage.engine_source:create_source"
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """`engine_start` ends when the engine is ready, and raises what keeps it from starting."""

    services: Services
    engine: ProcessEngineClient
    engine_start: asyncio.Task[None]


@asynccontextmanager
async def open_services(settings: Settings) -> AsyncIterator[Opened]:
    """Everything but the engine serves when this yields.

    Raises:
        ConfigurationError: a setting, the model's folder or the secret key cannot work.
        StorageError: the database or the store cannot be reached.
    """
    folder = (await asyncio.to_thread(resolve_model, settings.model)).resolve()
    make_data_folder(settings.data_dir)
    store = ArtifactStore(settings.store_url.get_secret_value(), cache_dir=settings.data_dir / "cache")
    engine = ProcessEngineClient(
        replace(settings.engine_config(), model=str(folder)),
        SourceSpec(factory=SOURCE_FACTORY, options=store.source_options),
    )
    base = build_base_spec(folder)
    async with AsyncExitStack() as stack:
        is_open = asyncio.Event()
        engine_start = await stack.enter_async_context(_starting(engine))
        tokenizing = asyncio.create_task(_load_tokenizer(settings, folder))
        stack.callback(tokenizing.cancel)
        installation = await stack.enter_async_context(open_installation(settings))
        await bootstrap(settings, installation.database, installation.api_keys)
        registry = await stack.enter_async_context(
            _registry(settings, installation.database, store=store, engine=engine, base=base)
        )
        engine.on_ready(lambda: _repin(registry, is_open))
        usage = await stack.enter_async_context(_usage(installation.database))
        await stack.enter_async_context(installation.tenants.finishing_deletions(registry.remove_tenant))
        running, metrics = RunningRequests(), Metrics()
        metrics.watch(engine, running)
        tokenizer = await tokenizing
        services = Services(
            settings=settings,
            secret_key=installation.secret_key,
            database=installation.database,
            store=store,
            base=base,
            engine=engine,
            tokenizer=tokenizer,
            generator=Generator(engine, tokenizer),
            api_keys=installation.api_keys,
            tenants=installation.tenants,
            registry=registry,
            usage=usage,
            metrics=metrics,
            running=running,
        )
        stack.callback(services.tokenizing.shutdown, wait=False, cancel_futures=True)
        is_open.set()
        yield Opened(services=services, engine=engine, engine_start=engine_start)


@asynccontextmanager
async def _starting(engine: ProcessEngineClient) -> AsyncIterator[asyncio.Task[None]]:
    start = asyncio.create_task(engine.start(), name="engine-start")
    try:
        yield start
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await engine.stop()


@asynccontextmanager
async def _registry(
    settings: Settings, database: Database, *, store: ArtifactStore, engine: ProcessEngineClient, base: BaseSpec
) -> AsyncIterator[AdapterRegistry]:
    registry = AdapterRegistry(
        database=database,
        store=store,
        engine=engine,
        base=base,
        served_model_name=settings.served_model_name,
        slot_rank=settings.slot_rank,
        uploads_dir=settings.data_dir / "uploads",
        max_upload_bytes=settings.max_upload_mib * MIB,
    )
    try:
        await registry.start()
        yield registry
    finally:
        await registry.aclose()


@asynccontextmanager
async def _usage(database: Database) -> AsyncIterator[UsageService]:
    usage = UsageService(database)
    usage.start()
    try:
        yield usage
    finally:
        await usage.aclose()


async def _load_tokenizer(settings: Settings, folder: Path) -> Tokenizer | None:
    """On a thread: it imports for seconds."""
    return None if settings.skip_tokenizer_init else await asyncio.to_thread(Tokenizer.from_folder, folder)


async def _repin(registry: AdapterRegistry, is_open: asyncio.Event) -> None:
    await is_open.wait()  # the engine may be ready before the rest
    await registry.repin()
