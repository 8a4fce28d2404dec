from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.http.body_limit import MAX_BODY_BYTES
from tests.platform.helpers import BaseWorld, open_base_world, serve


def add_routes(app: FastAPI) -> None:
    @app.post("/v1/parsed")
    async def parsed(body: dict[str, Any]) -> int:
        return len(body["text"])

    @app.post("/v1/streamed")
    async def streamed(request: Request) -> int:
        return sum([len(chunk) async for chunk in request.stream()])


@pytest.fixture
async def world(data_dir: Path) -> AsyncIterator[BaseWorld]:
    async with open_base_world(data_dir, add_routes=add_routes) as opened:
        yield opened


async def pieces(num_bytes: int, taken: list[int]) -> AsyncIterator[bytes]:
    size = 1 << 20
    for _ in range(num_bytes // size):
        taken.append(size)
        yield b"x" * size
    yield b"x" * (num_bytes % size)


@pytest.mark.parametrize("path", ["/v1/parsed", "/v1/streamed"])
async def test_a_declared_length_above_the_cap_is_413_and_nothing_is_read(world: BaseWorld, path: str) -> None:
    key = await world.key(Scope.INFER, tenant=await world.tenant("acme"))
    taken: list[int] = []
    reply = await world.client.post(
        path, content=pieces(64 << 20, taken), headers={**key, "content-length": str(64 << 20)}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "payload_too_large")
    assert str(MAX_BODY_BYTES) in reply.json()["error"]["message"]
    assert sum(taken) <= 1 << 20  # the answer was under way; a bounded rest is thrown away


@pytest.mark.parametrize("path", ["/v1/parsed", "/v1/streamed"])
async def test_an_undeclared_length_is_413_when_the_cap_is_passed(world: BaseWorld, path: str) -> None:
    key = await world.key(Scope.INFER, tenant=await world.tenant("acme"))
    taken: list[int] = []
    reply = await world.client.post(
        path, content=pieces(64 << 20, taken), headers={**key, "content-type": "application/json"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "payload_too_large")
    assert sum(taken) <= MAX_BODY_BYTES + (2 << 20)


async def test_a_body_of_just_the_cap_is_taken(world: BaseWorld) -> None:
    key = await world.key(Scope.INFER, tenant=await world.tenant("acme"))
    text = "x" * (MAX_BODY_BYTES - len('{"text":""}'))
    headers = {**key, "content-type": "application/json"}
    fits = await world.client.post("/v1/parsed", content=f'{{"text":"{text}"}}', headers=headers)
    assert fits.json() == len(text)
    over = await world.client.post("/v1/parsed", content=f'{{"text":"{text}x"}}', headers=headers)
    assert over.status_code == 413


async def test_over_a_socket_the_client_hears_413_and_the_server_goes_on(world: BaseWorld) -> None:
    key = await world.key(Scope.INFER, tenant=await world.tenant("acme"))

    def post(port: int, num_pieces: int) -> httpx.Response:
        pieces = (b"x" * (1 << 20) for _ in range(num_pieces))
        return httpx.post(f"http://127.0.0.1:{port}/v1/streamed", content=pieces, headers=key)

    async with serve(world.app) as port:
        assert (await asyncio.to_thread(post, port, 32)).status_code == 413
        assert (await asyncio.to_thread(post, port, 1)).json() == 1 << 20
