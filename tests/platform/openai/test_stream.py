"""Sending events: errors before and after the headers, clients that leave, and clients that stall."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from loraplex.adapters.errors import NeverFitsError
from loraplex.engine.errors import EngineDeadError
from loraplex.platform.adapters.resolution import ResolvedAdapter
from loraplex.platform.openai import stream
from loraplex.platform.openai.responses import Envelope
from loraplex.platform.openai.stream import EventStreamResponse
from loraplex.platform.telemetry.metrics import Metrics

SQL = ResolvedAdapter(name="sql", version=3, digest="d", weight=1.0)


class Connection:
    """One client; `leave` closes its end."""

    def __init__(self, *, is_reading: bool = True) -> None:
        self.sent: list[Message] = []
        self._is_reading = is_reading
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self._is_reading:
            await asyncio.Event().wait()
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


class Events:
    """A generator of events that remembers whether it was closed."""

    def __init__(self, *steps: bytes | Exception | None) -> None:
        self._steps = steps
        self.is_closed = False

    async def generate(self) -> AsyncGenerator[bytes, None]:
        try:
            for step in self._steps:
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await asyncio.Event().wait()
                else:
                    yield step
        finally:
            self.is_closed = True


async def send(events: Events, connection: Connection, metrics: Metrics | None = None) -> None:
    envelope = Envelope(id="req_1", object="text_completion", model="sql", adapters=(SQL,))
    response = EventStreamResponse(events.generate(), envelope=envelope, metrics=metrics or Metrics())
    await response({"type": "http"}, connection.receive, connection.send)


async def test_events_are_sent_one_by_one_and_the_stream_is_completed() -> None:
    connection = Connection()
    await send(Events(b"one", b"two"), connection)
    assert [message.get("body") for message in connection.sent] == [None, b"one", b"two", b""]
    headers = dict(connection.sent[0]["headers"])
    assert headers[b"x-accel-buffering"] == b"no"
    assert headers[b"content-type"].startswith(b"text/event-stream")


async def test_error_before_the_headers_gets_its_own_status_and_names_the_adapter() -> None:
    events, connection = Events(NeverFitsError("too big")), Connection()
    await send(events, connection)
    assert connection.sent[0]["status"] == 400
    body = json.loads(connection.body)
    assert body["error"]["code"] == "adapter_never_fits"
    assert body["lora"] == {"name": "sql", "version": 3, "digest": "d", "weight": 1.0}
    assert dict(connection.sent[0]["headers"])[b"content-length"] == str(len(connection.body)).encode()
    assert events.is_closed


async def test_unforeseen_error_before_the_headers_is_the_frameworks() -> None:
    with pytest.raises(ZeroDivisionError):
        await send(Events(ZeroDivisionError()), Connection())


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDeadError("gone"), "engine_dead"), (ZeroDivisionError("secret"), "internal_error")]
)
async def test_error_after_the_headers_is_the_last_event(error: Exception, code: str) -> None:
    connection, metrics = Connection(), Metrics()
    await send(Events(b"one", error), connection, metrics)
    last: dict[str, Any] = json.loads(connection.body.removeprefix(b"onedata: "))
    assert last["error"]["code"] == code
    assert (last["id"], last["model"], last["lora"]["version"]) == ("req_1", "sql", 3)
    assert b"secret" not in connection.body
    assert f'loraplex_errors_total{{code="{code}",kind="event"}} 1.0' in metrics.render().decode()
    assert connection.sent[-1]["more_body"] is False


@pytest.mark.parametrize("steps", [(None,), (b"one", None)])
async def test_client_that_leaves_closes_the_generation(steps: tuple[bytes | None, ...]) -> None:
    events, connection = Events(*steps), Connection()
    sending = asyncio.create_task(send(events, connection))
    await asyncio.sleep(0)
    connection.leave()
    await sending
    assert events.is_closed


async def test_client_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "SEND_TIMEOUT_S", 0.01)
    events = Events(b"one", None)
    await send(events, Connection(is_reading=False))
    assert events.is_closed


async def test_headers_do_not_wait_for_a_first_token_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "FIRST_EVENT_WAIT_S", 0.01)
    connection = Connection()
    sending = asyncio.create_task(send(Events(None), connection))
    while not connection.sent:
        await asyncio.sleep(0.01)
    assert connection.sent[0]["status"] == 200
    connection.leave()
    await sending


async def test_cancelling_the_response_closes_the_generation() -> None:
    events = Events(b"one", None)
    sending = asyncio.create_task(send(events, Connection()))
    await asyncio.sleep(0.01)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert events.is_closed
