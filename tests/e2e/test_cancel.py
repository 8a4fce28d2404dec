"""A request that nobody waits for any more ends at once, in the engine too."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, events, wait_until

LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 450, "ignore_eos": True, "lora": "a7"}


@pytest.fixture(scope="module")
def rival(server: Server, tenant: httpx.Client) -> Iterator[httpx.Client]:
    with server.create_tenant("cancel-rival") as client:
        yield client


def output_tokens(server: Server) -> int:
    total: int = server.api.get("/api/v1/engine").json()["stats"]["total_output_tokens"]
    return total


def test_closing_a_stream_frees_everything(server: Server, tenant: httpx.Client) -> None:
    before = output_tokens(server)
    with tenant.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 3}) as response:
        stream = events(response)
        next(stream)
        assert server.integrity()["num_blocks_in_use"] > 0
    server.wait_idle()
    assert output_tokens(server) - before < 3 * LONG["max_tokens"]


def test_closing_the_connection_of_a_whole_reply_frees_everything(server: Server, tenant: httpx.Client) -> None:
    before = output_tokens(server)
    with pytest.raises(httpx.ReadTimeout):
        tenant.post("/v1/completions", json=LONG, timeout=0.3)
    server.wait_idle()
    assert output_tokens(server) - before < LONG["max_tokens"]


def test_cancelled_request_tells_its_client_so(server: Server, tenant: httpx.Client) -> None:
    with tenant.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        stream = events(response)
        request_id = next(stream)["id"]
        assert request_id == response.headers["x-request-id"]
        assert tenant.delete(f"/v1/requests/{request_id}").status_code == 204
        *_, last = stream
    assert last["choices"][0]["finish_reason"] == "abort"
    server.wait_idle()
    assert tenant.delete(f"/v1/requests/{request_id}").status_code == 404


def test_others_cannot_cancel_and_a_clients_own_id_finds_nothing(tenant: httpx.Client, rival: httpx.Client) -> None:
    headers = {"x-request-id": "mine"}
    with tenant.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers) as response:
        stream = events(response)
        request_id = next(stream)["id"]
        assert response.headers["x-client-request-id"] == "mine"
        foreign, unknown = rival.delete(f"/v1/requests/{request_id}"), rival.delete("/v1/requests/req_0")
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json() == unknown.json()
        assert tenant.delete("/v1/requests/mine").status_code == 404
        assert next(stream)["choices"][0]["finish_reason"] is None


def test_reset_connection_in_the_queue_frees_everything(server: Server, tenant: httpx.Client) -> None:
    """Not even the headers were out."""
    host, port = server.url.removeprefix("http://").split(":")
    body = b'{"prompt": "hello", "max_tokens": 450, "ignore_eos": true, "stream": true}'
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    head += f"authorization: {tenant.headers['authorization']}\r\n\r\n"
    sockets = [socket.create_connection((host, int(port))) for _ in range(40)]
    for connection in sockets:
        connection.sendall(head.encode() + body)
    wait_until(lambda: server.integrity()["num_requests"] >= 30, "busy")
    for connection in sockets:
        connection.close()
    server.wait_idle()
