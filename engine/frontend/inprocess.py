"""An engine on a thread of this process, seen as an EngineClient: for tests and for programs with one event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator
from contextlib import aclosing

from loraplex.adapters.errors import LoraplexError
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.source import AdapterSource
from loraplex.engine.build import build_engine_core
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.engine_loop import EngineLoop
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.frontend.session import EngineSession
from loraplex.engine.messages import EngineCall, EngineEvent, EngineInfo, EngineStats, GenerateRequest, IntegrityReport
from loraplex.engine.outputs import RequestOutput


class InProcessEngineClient:
    """Implements `protocol.EngineClient` without a process boundary. It is not restarted when a step raises."""

    def __init__(self, config: EngineConfig, source: AdapterSource) -> None:
        self._config = config
        self._source = source
        self._calls: queue.SimpleQueue[EngineCall | None] = queue.SimpleQueue()  # None ends the loop
        self._session = EngineSession(self._calls.put)
        self._thread: threading.Thread | None = None
        self.state = EngineState.STARTING

    async def start(self) -> None:
        """Build the engine. Raises what `build_engine_core` raises."""
        core, info = await asyncio.to_thread(build_engine_core, self._config, self._source)
        self._session.deliver(info)
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(core, loop), name="engine", daemon=True)
        self._thread.start()
        self.state = EngineState.READY

    async def stop(self, grace_s: float = 0.0) -> None:
        """See ProcessEngineClient.stop."""
        self.state = EngineState.DRAINING
        await self._session.drain(grace_s)
        self._calls.put(None)
        if self._thread:
            await asyncio.to_thread(self._thread.join)
        self._session.fail(EngineDeadError("the engine was stopped"))
        self.state = EngineState.STOPPED

    @property
    def info(self) -> EngineInfo:
        assert self._session.info is not None, "not started"
        return self._session.info

    @property
    def stats(self) -> EngineStats:
        return self._session.stats

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        if self.state != EngineState.READY:
            raise EngineDeadError(f"the engine takes no requests now (it is {self.state})")
        async with aclosing(self._session.generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_ids: list[str]) -> None:
        self._session.abort(request_ids)

    async def load_adapter(self, ref: AdapterRef) -> None:
        await self._session.load_adapter(ref)

    async def unload_adapter(self, digest: str) -> None:
        await self._session.unload_adapter(digest)

    async def pin_adapter(self, ref: AdapterRef) -> None:
        await self._session.pin_adapter(ref)

    async def unpin_adapter(self, digest: str) -> None:
        await self._session.unpin_adapter(digest)

    async def integrity(self) -> IntegrityReport:
        return await self._session.integrity()

    def _run(self, core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        def send(event: EngineEvent) -> None:
            loop.call_soon_threadsafe(self._session.deliver, event)

        engine_loop = EngineLoop(core, receive=self._receive, send=send)
        try:
            engine_loop.run()
        except Exception as error:  # the edge of the thread: whoever waits is told
            loop.call_soon_threadsafe(self._fail, EngineDeadError(f"the engine failed: {error}"))

    def _receive(self, timeout_ms: int | None) -> list[EngineCall] | None:
        """See EngineLoop."""
        calls: list[EngineCall] = []
        try:
            call = self._calls.get(timeout_ms != 0, None if timeout_ms is None else timeout_ms / 1000)
            while call is not None:
                calls.append(call)
                call = self._calls.get_nowait()
        except queue.Empty:
            return calls
        return None

    def _fail(self, error: LoraplexError) -> None:
        self.state = EngineState.STOPPED
        self._session.fail(error)
