"""An engine in its own process, seen as an EngineClient."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.engine_handle import EngineHandle
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.frontend.session import EngineSession
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.frontend.supervisor import CrashReport, Supervisor
from loraplex.engine.messages import EngineInfo, EngineStats, GenerateRequest, IntegrityReport
from loraplex.engine.outputs import RequestOutput


class ProcessEngineClient:
    """Implements `protocol.EngineClient`. Lives in one event loop: `start`, use, `stop`."""

    def __init__(self, config: EngineConfig, source: SourceSpec) -> None:
        self._supervisor = Supervisor(lambda: EngineHandle.start(config, source))

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises:
            ConfigurationError: the engine cannot work with these settings; the message says what to change.
            EngineDeadError: it ended while it started.
        """
        await self._supervisor.start()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, let the running ones finish for `grace_s` seconds, abort the rest, end the engine."""
        await self._supervisor.stop(grace_s)

    def on_ready(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` each time an engine has become ready, the first included: a new one knows no pins."""
        self._supervisor.on_ready(callback)

    async def crashed(self) -> CrashReport:
        """Return when the engine died three times in a minute and is not started again (state STOPPED)."""
        return await self._supervisor.crashed()

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def pid(self) -> int | None:
        """Of the engine process that runs now or ran last."""
        return self._supervisor.pid

    @property
    def info(self) -> EngineInfo:
        session = self._supervisor.session
        info = session.info if session else None
        assert info is not None, "not started"
        return info

    @property
    def stats(self) -> EngineStats:
        session = self._supervisor.session
        return session.stats if session else EngineStats()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(self._session().generate(request)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_ids: list[str]) -> None:
        self._session(is_draining_allowed=True).abort(request_ids)

    async def load_adapter(self, ref: AdapterRef) -> None:
        await self._session().load_adapter(ref)

    async def unload_adapter(self, digest: str) -> None:
        await self._session().unload_adapter(digest)

    async def pin_adapter(self, ref: AdapterRef) -> None:
        await self._session().pin_adapter(ref)

    async def unpin_adapter(self, digest: str) -> None:
        await self._session().unpin_adapter(digest)

    async def integrity(self) -> IntegrityReport:
        return await self._session(is_draining_allowed=True).integrity()

    def _session(self, *, is_draining_allowed: bool = False) -> EngineSession:
        session, state = self._supervisor.session, self.state
        is_open = state == EngineState.READY or (is_draining_allowed and state == EngineState.DRAINING)
        if session is None or not is_open:
            raise EngineDeadError(f"the engine takes no requests now (it is {state}); try again in a few seconds")
        return session
