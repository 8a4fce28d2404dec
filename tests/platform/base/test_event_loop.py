"""The event loop answers probes and streams for everybody: nothing may keep it long, or wake it more than needed."""

from __future__ import annotations

import asyncio
import inspect
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.dependencies.models import Dependant

from loraplex.platform import engine_admin, health
from loraplex.platform.adapters import endpoints as adapters
from loraplex.platform.api_keys import endpoints as api_keys
from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.openai import router as openai
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.serve import _listen
from loraplex.platform.tenants import endpoints as tenants
from tests.platform.helpers import open_database


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
