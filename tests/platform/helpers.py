"""Worlds for the platform's tests: settings, a migrated database, and an app of the real layers and routes."""

from __future__ import annotations

import asyncio
import functools
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from loraplex.platform.api_keys import endpoints as key_endpoints
from loraplex.platform.api_keys.principal import Scope, TenantContext
from loraplex.platform.db.session import Database
from loraplex.platform.errors import install_error_handlers
from loraplex.platform.http.layers import install_layers
from loraplex.platform.installation import Installation, open_installation
from loraplex.platform.settings import Settings
from loraplex.platform.tenants import endpoints as tenant_endpoints

ADMIN_KEY = "the-operators-own-admin-key-for-tests"


def create_settings(data_dir: Path, **given: Any) -> Settings:
    return Settings.load(**{"model": "/models/tiny", "data_dir": data_dir, **given})


@functools.cache
def migrated_file() -> Path:
    """One SQLite file with the whole schema, to be copied: quicker than migrating each test's own."""
    path = Path(tempfile.mkdtemp(prefix="loraplex-tests-")) / "loraplex.db"

    async def migrate() -> None:
        database = Database(f"sqlite:///{path}")
        await database.upgrade()
        await database.aclose()

    # in a thread: the caller may be inside an event loop already
    with ThreadPoolExecutor(max_workers=1) as executor:
        executor.submit(asyncio.run, migrate()).result()
    return path


def copy_migrated(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / "loraplex.db"
    if not target.exists():
        shutil.copy(migrated_file(), target)
    return target


@asynccontextmanager
async def open_database(folder: Path) -> AsyncIterator[Database]:
    database = Database(f"sqlite:///{copy_migrated(folder)}")
    try:
        yield database
    finally:
        await database.aclose()


class RemovedTenants:
    """Stands where the adapter registry stands, and remembers whose files were to go."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.failures = 0

    async def remove_tenant(self, tenant_id: str) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("the store is away")
        self.ids.append(tenant_id)


@dataclass(kw_only=True)
class BaseWorld:
    """An app with the platform's base: its layers, its error handlers, tenants and keys."""

    app: FastAPI
    client: httpx.AsyncClient
    installation: Installation
    registry: RemovedTenants
    admin: dict[str, str]  # headers

    async def tenant(self, name: str) -> TenantContext:
        await self.installation.tenants.create(name, actor="test")
        return await self.installation.tenants.context(name)

    async def key(self, *scopes: Scope, tenant: TenantContext | None = None, **given: Any) -> dict[str, str]:
        """Headers with a new key."""
        created = await self.installation.api_keys.create(
            name="test", scopes=scopes, tenant=tenant, granted_by=None, **given
        )
        return bearer(created.secret)


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@asynccontextmanager
async def open_base_world(
    folder: Path, *, add_routes: Callable[[FastAPI], None] = lambda app: None, **given: Any
) -> AsyncIterator[BaseWorld]:
    copy_migrated(folder)
    settings = create_settings(folder, **given)
    async with open_installation(settings) as installation:
        registry = RemovedTenants()
        app = create_base_app(settings, installation, registry)
        add_routes(app)
        admin = await installation.api_keys.create(
            name="admin", scopes=[Scope.PLATFORM_ADMIN], tenant=None, granted_by=None
        )
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            yield BaseWorld(
                app=app, client=client, installation=installation, registry=registry, admin=bearer(admin.secret)
            )


def create_base_app(settings: Settings, installation: Installation, registry: RemovedTenants) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None)
    app.state.services = SimpleNamespace(
        settings=settings,
        secret_key=installation.secret_key,
        database=installation.database,
        api_keys=installation.api_keys,
        tenants=installation.tenants,
        registry=registry,
    )
    app.include_router(tenant_endpoints.router)
    app.include_router(key_endpoints.router)
    install_error_handlers(app)
    install_layers(app, cors_origins=settings.cors_origin)
    return app


@asynccontextmanager
async def serve(app: ASGIApp) -> AsyncIterator[int]:
    """The app on a real socket of this machine, and its port."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task
