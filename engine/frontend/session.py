"""The client's side of one life of an engine: who waits for which event."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable

from loraplex.adapters.errors import (
    AdapterLoadError,
    InvalidRequestError,
    LoraplexError,
    NeverFitsError,
    ServerError,
)
from loraplex.adapters.ref import AdapterRef
from loraplex.engine.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineDeadError,
    NoFreeSlotsError,
    NonFiniteLogitsError,
)
from loraplex.engine.frontend.output_queue import OutputQueue
from loraplex.engine.messages import (
    AbortRequests,
    CallReply,
    EngineCall,
    EngineEvent,
    EngineFailed,
    EngineInfo,
    EngineStats,
    GenerateRequest,
    GetIntegrity,
    IntegrityReport,
    LoadAdapter,
    OutputBatch,
    PinAdapter,
    UnloadAdapter,
    UnpinAdapter,
)
from loraplex.engine.outputs import ErrorInfo, RequestOutput

INTEGRITY_TIMEOUT_S = 30.0
ABORT_TIMEOUT_S = 2.0
DRAIN_POLL_S = 0.02
ADAPTER_TIMEOUT_S = 300.0  # a load waits for room, an unload for the requests that use the version

_ERRORS: dict[str, type[LoraplexError]] = {
    error.code: error
    for error in (
        AdapterLoadError,
        ConfigurationError,
        ContextLengthError,
        EngineDeadError,
        InvalidRequestError,
        NeverFitsError,
        NoFreeSlotsError,
        NonFiniteLogitsError,
    )
}


class EngineSession:
    """Sends calls, and hands each event to the stream or call that waits for it.

    Belongs to one event loop. `send` must not block; `deliver` and `fail` are called on the loop's thread.
    """

    def __init__(self, send: Callable[[EngineCall], None]) -> None:
        self._send = send
        self._streams: dict[str, OutputQueue] = {}
        self._calls: dict[int, asyncio.Future[CallReply]] = {}
        self._call_ids = itertools.count(1)
        self._error: LoraplexError | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.last_request_ids: list[str] = []  # in the batch when the engine failed

    @property
    def request_ids(self) -> list[str]:
        """Of the streams that are open."""
        return list(self._streams)

    @property
    def is_dead(self) -> bool:
        return self._error is not None

    def deliver(self, event: EngineEvent) -> None:
        match event:
            case OutputBatch():
                for output in event.outputs:
                    self._deliver_output(output)
            case EngineStats():
                self.stats = event
            case CallReply():
                if (future := self._calls.get(event.call_id)) and not future.done():
                    future.set_result(event)
            case EngineInfo():
                self.info = event
            case EngineFailed():
                self.last_request_ids = event.last_request_ids

    def fail(self, error: LoraplexError) -> None:
        """The engine is gone: every open stream and call raises, and so does every new one."""
        self._error = error
        self.last_request_ids = self.last_request_ids or self.request_ids
        for queue in self._streams.values():
            queue.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """See EngineClient.generate."""
        queue = self._open_stream(request)
        try:
            while True:
                output = await queue.get()
                yield output
                if output.finish_reason:
                    return
        finally:
            # Still there: the reader left early, or the engine died.
            if self._streams.pop(request.request_id, None) and self._error is None:
                self._send(AbortRequests([request.request_id]))

    def abort(self, request_ids: list[str]) -> None:
        """Streams end with finish_reason ABORT."""
        self._raise_if_dead()
        self._send(AbortRequests(request_ids))

    async def load_adapter(self, ref: AdapterRef) -> None:
        await self._call(lambda call_id: LoadAdapter(call_id, ref), timeout_s=ADAPTER_TIMEOUT_S)

    async def unload_adapter(self, digest: str) -> None:
        await self._call(lambda call_id: UnloadAdapter(call_id, digest), timeout_s=ADAPTER_TIMEOUT_S)

    async def pin_adapter(self, ref: AdapterRef) -> None:
        await self._call(lambda call_id: PinAdapter(call_id, ref), timeout_s=ADAPTER_TIMEOUT_S)

    async def unpin_adapter(self, digest: str) -> None:
        await self._call(lambda call_id: UnpinAdapter(call_id, digest), timeout_s=ADAPTER_TIMEOUT_S)

    async def integrity(self) -> IntegrityReport:
        reply = await self._call(GetIntegrity, timeout_s=INTEGRITY_TIMEOUT_S)
        assert reply.integrity is not None
        return reply.integrity

    async def drain(self, grace_s: float) -> None:
        """Wait until no stream is open; after `grace_s` seconds abort those that are."""
        if not await self._is_drained(grace_s) and self._error is None:
            self.abort(self.request_ids)
            await self._is_drained(ABORT_TIMEOUT_S)

    def _open_stream(self, request: GenerateRequest) -> OutputQueue:
        self._raise_if_dead()
        if request.request_id in self._streams:
            raise InvalidRequestError(f"request id {request.request_id} is already in use", param="request_id")
        self._send(request)  # raises when a value cannot cross; outputs are delivered later, on this thread
        queue = self._streams[request.request_id] = OutputQueue()
        return queue

    def _deliver_output(self, output: RequestOutput) -> None:
        """Outputs of streams that were closed early are on their way until the abort arrives: dropped."""
        if queue := self._streams.get(output.request_id):
            queue.put(output)
            if output.finish_reason:
                del self._streams[output.request_id]

    async def _call(self, make_call: Callable[[int], EngineCall], *, timeout_s: float) -> CallReply:
        self._raise_if_dead()
        call_id = next(self._call_ids)
        future: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(make_call(call_id))
            reply = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise EngineDeadError(f"the engine did not answer within {timeout_s:.0f} s") from None
        finally:
            del self._calls[call_id]
        if reply.error:
            raise error_of(reply.error)
        return reply

    async def _is_drained(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._streams and self._error is None and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        return not self._streams

    def _raise_if_dead(self) -> None:
        if self._error:
            raise self._error


def error_of(info: ErrorInfo) -> LoraplexError:
    """The error that crossed the process boundary as `info`."""
    return _ERRORS.get(info.code, ServerError)(info.message)
