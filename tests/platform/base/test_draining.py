"""What runs when the server is told to stop has its grace to finish: uploads as well as answers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from loraplex.platform.draining import DrainingMiddleware
from loraplex.platform.in_progress import RequestsInProgress
from loraplex.platform.serve import _drain

UPLOAD = "/api/v1/tenants/acme/adapters/sql/versions"


class World:
    """A server with one route, which answers when it may."""

    def __init__(self, *, grace_s: float = 60.0) -> None:
        self.may_end = asyncio.Event()
        self.sent: list[Message] = []
        self.num_cancelled = 0
        self.second: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.services = SimpleNamespace(
            is_draining=False,
            in_progress=RequestsInProgress(),
            running=SimpleNamespace(cancel_all=self._cancel),
            settings=SimpleNamespace(shutdown_grace_s=grace_s),
        )
        self.layer = DrainingMiddleware(self._app, cast(Any, self.services))

    async def request(self, path: str = UPLOAD) -> None:
        scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        await self.layer(scope, cast(Any, None), self._send)

    async def drain(self) -> None:
        await _drain(cast(Any, self.services), cast(Any, SimpleNamespace(second=self.second)))

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.may_end.wait()
        await send({"type": "http.response.start", "status": 201, "headers": []})

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _cancel(self) -> None:
        self.num_cancelled += 1
        self.may_end.set()


@pytest.mark.parametrize("path", [UPLOAD, "/v1/chat/completions"])
async def test_what_runs_is_waited_for(path: str) -> None:
    world = World()
    running = asyncio.create_task(world.request(path))
    await asyncio.sleep(0)
    draining = asyncio.create_task(world.drain())
    await asyncio.sleep(0.05)
    assert not draining.done()
    world.may_end.set()
    await asyncio.gather(running, draining)
    assert world.sent[0]["status"] == 201
    assert world.num_cancelled == 0


async def test_nothing_new_begins_and_probes_go_on() -> None:
    world = World()
    world.may_end.set()
    await world.drain()
    await world.request()
    assert world.sent[0]["status"] == 503
    await world.request("/livez")
    assert world.sent[2]["status"] == 201


@pytest.mark.parametrize("is_signalled", [False, True])
async def test_after_the_grace_or_a_second_signal_answers_are_cut(is_signalled: bool) -> None:
    world = World(grace_s=60.0 if is_signalled else 0.01)
    running = asyncio.create_task(world.request())
    await asyncio.sleep(0)
    if is_signalled:
        world.second.set_result(None)
    await world.drain()
    await running
    assert world.num_cancelled == 1
