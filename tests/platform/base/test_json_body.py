"""Bodies are read strictly, and cost the event loop little whatever they hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.platform.helpers import BaseWorld, open_base_world


@pytest.fixture
async def world(data_dir: Path) -> AsyncIterator[BaseWorld]:
    async with open_base_world(data_dir) as opened:
        yield opened


async def post(world: BaseWorld, body: bytes, path: str = "/api/v1/tenants") -> httpx.Response:
    headers = {**world.admin, "content-type": "application/json"}
    return await world.client.post(path, content=body, headers=headers)


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": NaN}',
        b'{"name": 1e999}',
        b'{"name": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"name": "\xff"}',
        b'{"name": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"name": "a"} {}',
        b"\xef\xbb\xbf{}",
    ],
)
async def test_what_is_no_json_is_a_400_that_says_so(world: BaseWorld, body: bytes) -> None:
    reply = await post(world, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("the body is not valid JSON: ")


async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    world: BaseWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgspec.json.decode", None)
    reply = await post(world, b'{"name": [' + b",".join([b"1"] * 600_000) + b"]}")
    assert reply.status_code == 400
    assert "more than 524288 values" in reply.json()["error"]["message"]


async def test_a_body_whose_fields_disagree_is_told_how(world: BaseWorld) -> None:
    reply = await post(world, b'{"name": "k", "scopes": ["infer"], "expires_at": "9999-12-31T23:59:59-23:00"}', KEYS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "expires_at")


KEYS = "/api/v1/keys"


@pytest.mark.parametrize("name", ["\\u0000", "a\\nb", "\\u007f"])
async def test_a_keys_name_has_no_control_characters(world: BaseWorld, name: str) -> None:
    reply = await post(world, f'{{"name": "{name}", "scopes": ["infer"]}}'.encode(), KEYS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")


async def test_a_scope_given_twice_is_one(world: BaseWorld) -> None:
    reply = await post(world, b'{"name": "k", "scopes": ["infer", "infer"]}', KEYS)
    assert reply.json()["scopes"] == ["infer"]


@pytest.mark.parametrize("path", ["/api/v1/tenants?after=%00", "/api/v1/keys?after=%00"])
async def test_a_page_begins_behind_printable_text(world: BaseWorld, path: str) -> None:
    assert (await world.client.get(path, headers=world.admin)).status_code == 400


async def test_no_tenant_is_named_like_anothers_id(world: BaseWorld) -> None:
    tenant = await world.tenant("acme")
    reply = await post(world, f'{{"name": "{tenant.id}"}}'.encode())
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "name")
