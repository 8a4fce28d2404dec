"""The two one-way ZeroMQ sockets between a client and its engine process.

Both are files in a folder that only this user can enter. The client binds, the engine connects.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import EngineConfig
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.frontend.wire import decode_call, decode_event, decode_fields, encode
from loraplex.engine.messages import CallReply, EngineCall, EngineEvent, OutputBatch
from loraplex.engine.outputs import ErrorInfo, FinishReason, RequestOutput

logger = logging.getLogger(__name__)

CALLS, EVENTS = "calls", "events"
LINGER_MS = 1000  # an engine that fails waits so long for its last words to leave


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine process reads from its standard input, as JSON."""

    config: EngineConfig
    source: SourceSpec
    socket_folder: str
    parent_pid: int
    log_level: int


class ClientChannel:
    """The client's side; belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.asyncio.Context()
        self._calls = zmq.Socket(self._context, zmq.PUSH)  # plain: sending never waits
        self._events = self._context.socket(zmq.PULL)
        for socket, name in ((self._calls, CALLS), (self._events, EVENTS)):
            socket.set_hwm(0)
            socket.linger = 0
            socket.bind(_address(folder, name))

    def send(self, call: EngineCall) -> None:
        """Never blocks. A call to an engine that is gone is dropped: whoever notices its end fails the caller."""
        try:
            self._calls.send(encode(call), zmq.NOBLOCK)
        except zmq.Again:
            logger.debug("call to a dead engine dropped")

    async def receive(self) -> EngineEvent:
        return decode_event(await self._events.recv())

    def close(self) -> None:
        self._calls.close()  # the context does not know of it, and would wait for it
        self._context.destroy()


class EngineChannel:
    """The engine's side. Nothing that arrives can raise."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._calls = self._context.socket(zmq.PULL)
        self._events = self._context.socket(zmq.PUSH)
        for socket, name in ((self._calls, CALLS), (self._events, EVENTS)):
            socket.set_hwm(0)  # bounded by max_tokens; a step must never wait for a reader
            socket.linger = LINGER_MS
            socket.connect(_address(folder, name))

    def receive(self, timeout_ms: int | None) -> list[EngineCall]:
        """All calls that are there; if there is none, wait for one (None: for ever, 0: not at all)."""
        calls: list[EngineCall] = []
        if self._calls.poll(timeout_ms):
            while message := self._receive_one():
                if call := self._decode(message):
                    calls.append(call)
        return calls

    def send(self, event: EngineEvent) -> None:
        self._events.send(encode(event))

    def close(self) -> None:
        self._context.destroy()

    def _receive_one(self) -> bytes | None:
        try:
            return self._calls.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _decode(self, message: bytes) -> EngineCall | None:
        try:
            return decode_call(message)
        except (msgspec.MsgspecError, LoraplexError) as error:
            logger.error("malformed call dropped: %s", error)
            if refusal := _refusal(message, str(error)):
                self.send(refusal)
            return None


def _address(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


def _refusal(message: bytes, reason: str) -> EngineEvent | None:
    """An answer for whoever waits for the malformed call, when it can still be read who that is."""
    fields = decode_fields(message)
    error = ErrorInfo(code="invalid_request", message=f"the engine cannot read this call: {reason}")
    request_id, call_id = fields.get("request_id"), fields.get("call_id")
    if isinstance(request_id, str):
        return OutputBatch([RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)])
    return CallReply(call_id=call_id, error=error) if isinstance(call_id, int) else None
