"""The event loop answers probes and streams for everybody: nothing may keep it long, or wake it more than needed."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.dependencies.models import Dependant

from loraplex.platform import engine_admin, health
from loraplex.platform import serve as serve_module
from loraplex.platform.adapters import endpoints as adapters
from loraplex.platform.api_keys import endpoints as api_keys
from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.db import session as session_module
from loraplex.platform.db.models import Setting
from loraplex.platform.errors import StorageError
from loraplex.platform.openai import router as openai
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.serve import _listen
from loraplex.platform.tenants import endpoints as tenants
from tests.platform.helpers import open_base_world, open_database


def functions(dependant: Dependant) -> Iterator[Any]:
    for child in dependant.dependencies:
        yield child.call
        yield from functions(child)


@pytest.mark.parametrize("module", [adapters, api_keys, engine_admin, health, openai, tenants])
def test_no_route_needs_a_thread(module: Any) -> None:
    """The framework calls a plain function on a thread: several hops for every request."""
    routes = [cast(Any, route) for route in module.router.routes]
    called = [route.endpoint for route in routes] + [one for route in routes for one in functions(route.dependant)]
    assert called
    assert [one for one in called if not inspect.iscoroutinefunction(one)] == []


def test_a_reply_never_waits_for_the_clients_acknowledgement() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_many_requests_with_one_key_ask_the_database_once(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SimpleNamespace(times=0)
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SecretKey(b"0" * 32))
        created = await service.create(name="k", scopes=[Scope.INFER], tenant=None, granted_by=None)
        find = service._find

        async def counted(digest: bytes) -> Any:
            asked.times += 1
            return await find(digest)

        monkeypatch.setattr(service, "_find", counted)
        principals = await asyncio.gather(*(service.authenticate(created.secret) for _ in range(50)))
    assert {principal.key_id for principal in principals} == {created.key.id}
    assert asked.times == 1


async def test_many_requests_in_one_tenant_ask_the_database_once(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = SimpleNamespace(times=0)
    async with open_base_world(data_dir) as world:
        tenants_service = world.installation.tenants
        await tenants_service.create("acme", actor="test")
        get = tenants_service.get

        async def counted(name: str) -> Any:
            asked.times += 1
            return await get(name)

        monkeypatch.setattr(tenants_service, "get", counted)
        await asyncio.gather(*(tenants_service.context("acme") for _ in range(50)))
    assert asked.times == 1


async def test_writers_of_sqlite_wait_without_a_connection(data_dir: Path) -> None:
    """So that readers always find one: the pool has fifteen."""
    async with open_database(data_dir) as database:

        async def write(number: int) -> None:
            async with database.session() as session:
                session.add(Setting(name=f"s{number}", value="x"))

        async with database.session():
            writers = [asyncio.create_task(write(number)) for number in range(20)]
            await asyncio.sleep(0.05)
            async with asyncio.timeout(10), database.read_session() as session:
                assert await session.get(Setting, "s0") is None
        await asyncio.gather(*writers)


async def test_a_server_spares_what_it_has_loaded_the_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served: list[int] = []

    class Server:
        should_exit = False

        def __init__(self, _: object) -> None: ...

        async def serve(self, sockets: object) -> None:
            served.append(gc.get_freeze_count())

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(serve_module, "_Server", Server)
    monkeypatch.setattr(serve_module, "_uvicorn_config", lambda services: None)
    monkeypatch.setattr(serve_module, "_watch_engine", never)
    monkeypatch.setattr(serve_module, "_drain", lambda *_: asyncio.sleep(0))
    signals = SimpleNamespace(first=asyncio.get_running_loop().create_future())
    try:
        with _listen("127.0.0.1", 0) as listener:
            opened: Any = SimpleNamespace(services=None)
            await serve_module._serve_until_end(opened, listener, cast(Any, signals), lambda *_: None)
    finally:
        gc.unfreeze()
    assert served[0] > 0


async def test_a_writer_does_not_wait_in_line_for_ever(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "SQLITE_BUSY_TIMEOUT_MS", 10)
    async with open_database(data_dir) as database, database.session():
        with pytest.raises(StorageError, match="too busy"):
            async with database.session():
                pass
