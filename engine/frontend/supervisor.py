"""Keeps an engine process alive: starts it, starts it again when it dies, gives up when it keeps dying."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.engine_handle import EngineHandle
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.frontend.session import EngineSession

logger = logging.getLogger(__name__)

MAX_CRASHES = 3
CRASH_WINDOW_S = 60.0  # of service: time that an engine takes to start does not count


class CrashReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why the supervisor gave up. `last_request_ids` were in the batch at the last death."""

    last_request_ids: list[str]
    message: str


class Supervisor:
    """Owns the engine process. `state` is READY exactly while `session` may be used for new requests."""

    def __init__(self, start_engine: Callable[[], Awaitable[EngineHandle]]) -> None:
        self._start_engine = start_engine
        self._on_ready: list[Callable[[], Awaitable[None]]] = []
        self._handle: EngineHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self._crashes = CrashCounter()
        self._crash: asyncio.Future[CrashReport] | None = None
        self._state = EngineState.STARTING

    @property
    def state(self) -> EngineState:
        is_dying = self._state is EngineState.READY and self.session is not None and self.session.is_dead
        return EngineState.RESTARTING if is_dying else self._state

    @property
    def session(self) -> EngineSession | None:
        """Of the engine that runs now or ran last."""
        return self._handle.session if self._handle else None

    @property
    def pid(self) -> int | None:
        return self._handle.pid if self._handle else None

    def on_ready(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` whenever an engine has become ready, also when one is already: a new one knows no pins."""
        self._on_ready.append(callback)
        if self.state is EngineState.READY:
            self._tell_ready([callback])

    async def start(self) -> None:
        """Start the first engine. Its refusal to start is raised, and not tried again."""
        self._crash = asyncio.get_running_loop().create_future()
        try:
            self._handle = await self._start_engine()
        except BaseException:
            self._state = EngineState.STOPPED
            raise
        if self._state is not EngineState.STARTING:
            await self._handle.end()
            raise EngineDeadError("the engine was stopped while it started")
        self._become_ready()
        self._watcher = asyncio.create_task(self._watch(self._handle), name="engine-supervisor")

    async def crashed(self) -> CrashReport:
        """Wait until the supervisor gives up. The server should then exit with a status that is not zero."""
        assert self._crash is not None, "not started"
        return await asyncio.shield(self._crash)

    async def stop(self, grace_s: float) -> None:
        """No new requests; what runs may finish for `grace_s`, is aborted then; the engine ends."""
        if self.state in (EngineState.DRAINING, EngineState.STOPPED):
            return
        self._state = EngineState.DRAINING
        tasks = [*self._telling, *([self._watcher] if self._watcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._handle:
            await self._handle.session.drain(grace_s)
            await self._handle.end()
        self._state = EngineState.STOPPED

    async def _watch(self, handle: EngineHandle) -> None:
        while True:
            returncode = await handle.ended()
            self._state = EngineState.RESTARTING
            logger.error("the engine died (status %s); in the batch: %s", returncode, handle.session.last_request_ids)
            successor = await self._restart(handle.session.last_request_ids)
            if successor is None:
                return
            self._handle = handle = successor
            self._become_ready()

    async def _restart(self, last_request_ids: list[str]) -> EngineHandle | None:
        """A new engine; None when the supervisor gave up. A failed start counts as one more death."""
        message = "the engine died"
        while self._crashes.count() < MAX_CRASHES:
            try:
                return await self._start_engine()
            except LoraplexError as error:
                message = f"the engine could not start again: {error}"
                logger.error("%s", message)
        self._give_up(
            CrashReport(last_request_ids=last_request_ids, message=f"{message}; {MAX_CRASHES} deaths in a row")
        )
        return None

    def _become_ready(self) -> None:
        self._crashes.serving()
        self._state = EngineState.READY
        self._tell_ready(self._on_ready)

    def _tell_ready(self, callbacks: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """In a task of its own: a callback may wait for this very engine, whose death must be noticed meanwhile."""
        task = asyncio.create_task(_call_all(tuple(callbacks)), name="engine-ready")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _give_up(self, report: CrashReport) -> None:
        self._state = EngineState.STOPPED
        logger.critical("%s; last requests: %s", report.message, report.last_request_ids)
        assert self._crash is not None
        self._crash.set_result(report)


class CrashCounter:
    """Counts the deaths within a window of service time, so that slow starts do not hide a crash loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served_s = 0.0
        self._ready_at: float | None = None
        self._deaths: list[float] = []  # in served seconds

    def serving(self) -> None:
        self._ready_at = self._clock()

    def count(self) -> int:
        """Note a death; return how many there were within the window."""
        if self._ready_at is not None:
            self._served_s += self._clock() - self._ready_at
            self._ready_at = None
        self._deaths = [death for death in self._deaths if self._served_s - death <= CRASH_WINDOW_S]
        self._deaths.append(self._served_s)
        return len(self._deaths)


async def _call_all(callbacks: Sequence[Callable[[], Awaitable[None]]]) -> None:
    for callback in callbacks:
        try:
            await callback()
        except LoraplexError as error:  # e.g. a pinned version that cannot be read: the engine serves on
            logger.error("after the engine became ready: %s", error)
