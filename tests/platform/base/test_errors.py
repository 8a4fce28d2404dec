from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal, cast

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from loraplex.adapters.errors import AdapterRefusedError, ClientError, LoraplexError, Reason
from loraplex.engine import errors as engine_errors
from loraplex.platform.errors import HTTP_STATUS, ServiceUnavailableError, error_response, http_status
from loraplex.platform.telemetry.layer import ErrorCountMiddleware
from loraplex.platform.telemetry.metrics import Metrics
from tests.platform.helpers import BaseWorld, open_base_world

assert engine_errors  # its classes belong to the tree that is walked below


def tree(root: type[LoraplexError] = LoraplexError) -> Iterator[type[LoraplexError]]:
    yield root
    for leaf in root.__subclasses__():
        yield from tree(leaf)


KINDS: list[type[LoraplexError]] = sorted(set(tree()), key=lambda kind: str(kind))


class Message(BaseModel):
    role: Literal["user", "system"]
    content: str


class Body(BaseModel):
    messages: list[Message]
    top_p: float = Field(default=1.0, le=1)


def add_routes(app: FastAPI) -> None:
    @app.post("/admin/typed")  # below /admin/ nobody is asked for a key
    async def typed(body: Body, limit: int = 1) -> int:
        return limit

    @app.get("/admin/fails")
    async def fails() -> None:
        raise ZeroDivisionError("password=hush")

    @app.get("/admin/starts")
    async def starts() -> None:
        raise ServiceUnavailableError("the engine is starting")

    @app.get("/admin/refuses")
    async def refuses() -> None:
        raise AdapterRefusedError(
            [Reason(code="a", message="first", file="x"), Reason(code="b", message="second", remedy="do it")]
        )


@pytest.fixture
async def world(data_dir: Path) -> AsyncIterator[BaseWorld]:
    async with open_base_world(data_dir, add_routes=add_routes) as opened:
        yield opened


def check_shape(reply: httpx.Response) -> dict[str, object]:
    assert reply.headers["content-type"] == "application/json"
    (error,) = reply.json().values()
    assert set(error) - {"reasons"} == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["code"], str)
    return dict(error)


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_its_own_code_a_status_and_the_one_shape(kind: type[LoraplexError]) -> None:
    error = kind([Reason(code="a", message="why")]) if issubclass(kind, AdapterRefusedError) else kind("why", param="x")
    rendered = error_response(error, request_id="req_1")
    reply = httpx.Response(rendered.status_code, content=bytes(rendered.body), headers=dict(rendered.headers))
    assert check_shape(reply)["code"] == kind.code
    assert rendered.status_code == http_status(kind)
    assert (rendered.status_code >= 500) == (check_shape(reply)["type"] == "server_error")
    assert reply.headers["x-request-id"] == "req_1"


def test_what_a_caller_can_mend_has_a_chosen_status_and_codes_are_not_shared() -> None:
    own = [kind for kind in KINDS if kind.__module__.startswith("loraplex.")]
    leaves = [kind for kind in own if issubclass(kind, ClientError) and kind is not ClientError]
    assert all(set(kind.__mro__) & set(HTTP_STATUS) - {ClientError, LoraplexError} for kind in leaves)
    codes = [kind.code for kind in own if "code" in vars(kind)]
    assert len(codes) == len(set(codes))


async def test_an_upload_that_is_refused_carries_every_reason(world: BaseWorld) -> None:
    reply = await world.client.get("/admin/refuses")
    assert reply.status_code == 422
    assert check_shape(reply)["reasons"] == [
        {"code": "a", "message": "first", "file": "x", "tensor": None, "remedy": None},
        {"code": "b", "message": "second", "file": None, "tensor": None, "remedy": "do it"},
    ]


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        ('{"messages": "hi"}', "messages", "messages: Input should be a valid list"),
        ('{"messages": [{"role": "cat", "content": "x"}]}', "messages.0.role", "'user' or 'system'"),
        ('{"messages": [], "top_p": 2}', "top_p", "less than or equal to 1"),
        ("{}", "messages", "messages: Field required"),
        ("{", None, "not valid JSON"),
        ('"text"', None, "must be a JSON object"),
        ("", None, "must be a JSON object"),
        ("\xff\xfe", None, ""),
    ],
)
async def test_a_wrong_body_is_400_and_names_the_field(
    world: BaseWorld, content: str, param: str | None, message: str
) -> None:
    reply = await world.client.post(
        "/admin/typed", content=content.encode("latin-1"), headers={"content-type": "application/json"}
    )
    error = check_shape(reply)
    assert (reply.status_code, error["param"]) == (400, param)
    assert message in str(error["message"])
    assert not [word for word in ("pydantic", "input_value", "Traceback", "errors.pydantic") if word in reply.text]


async def test_a_body_without_its_content_type_is_told_which(world: BaseWorld) -> None:
    reply = await world.client.post("/admin/typed", content=b'{"messages": []}')
    assert (reply.status_code, "application/json" in str(check_shape(reply)["message"])) == (400, True)


async def test_a_wrong_query_names_its_parameter(world: BaseWorld) -> None:
    reply = await world.client.post("/admin/typed?limit=many", json={"messages": []})
    assert (reply.status_code, check_shape(reply)["param"]) == (400, "limit")


async def test_frameworks_own_errors_have_the_shape_too(world: BaseWorld) -> None:
    missing = await world.client.get("/api/v1/nothing", headers=world.admin)
    assert (missing.status_code, check_shape(missing)["code"]) == (404, "not_found")
    wrong_method = await world.client.put("/api/v1/tenants", headers=world.admin)
    assert (wrong_method.status_code, check_shape(wrong_method)["code"]) == (405, "method_not_allowed")
    assert "GET" in wrong_method.headers["allow"] or "POST" in wrong_method.headers["allow"]


async def test_what_nobody_foresaw_is_logged_and_not_told(world: BaseWorld, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        reply = await world.client.get("/admin/fails")
    error = check_shape(reply)
    assert (reply.status_code, error["code"]) == (500, "internal_error")
    assert "hush" not in reply.text
    assert "ZeroDivision" not in reply.text
    request_id = reply.headers["x-request-id"]
    assert request_id in str(error["message"])
    assert request_id in caplog.text
    assert "ZeroDivisionError: password=hush" in caplog.text


async def test_what_is_only_away_for_now_is_logged_in_one_line(
    world: BaseWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients ask again and again while an engine starts."""
    assert (await world.client.get("/admin/starts")).status_code == 503
    (line,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert line.exc_info is None


async def test_an_error_that_nobody_foresaw_is_counted(world: BaseWorld) -> None:
    metrics = Metrics()

    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await ErrorCountMiddleware(fails, metrics)({"type": "http", "path": "/v1/models"}, cast(Any, None), unsent)
    assert b'loraplex_errors_total{code="500",kind="reply"} 1.0' in metrics.render()


async def unsent(message: object) -> None:
    raise AssertionError("nobody answers here")
