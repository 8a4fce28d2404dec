"""One server process from its start to its exit status.

Exit status: 0 after SIGTERM or SIGINT, 1 when it could not start or the engine kept dying, 2 for settings that cannot
work. The port answers as soon as everything but the engine is there; `/readyz` is 503 until the engine is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.collector import spare_collector
from loraplex.platform.app import create_app
from loraplex.platform.services import Services
from loraplex.platform.settings import Settings
from loraplex.platform.startup import Opened, open_services

KEEP_ALIVE_S = 75  # longer than the usual proxies', so that they close first
LAST_WORDS_S = 5.0  # for replies to say that they were cut off

logger = logging.getLogger(__name__)

OnReady = Callable[[Services, str], None]


class EngineGivenUpError(LoraplexError):
    """The engine died again and again; the message has its last requests."""


async def serve(settings: Settings, on_ready: OnReady) -> None:
    """Serve until SIGTERM or SIGINT, then let running requests finish. `on_ready(services, url)` is called once.

    Raises:
        ConfigurationError: a setting cannot work, or the port is taken.
        EngineGivenUpError: the engine died three times in a minute of service.
        LoraplexError: the database, the store or the engine cannot be reached or started.
    """
    with (
        _listen(settings.host, settings.port) as listener,
        _Signals() as signals,
        signals.cancelling_start() as has_started,
    ):
        async with open_services(settings) as opened:
            has_started()
            await _serve_until_end(opened, listener, signals, on_ready)


async def _serve_until_end(opened: Opened, listener: socket.socket, signals: _Signals, on_ready: OnReady) -> None:
    services = opened.services
    server = _Server(_uvicorn_config(services))
    spare_collector()
    http = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    engine = asyncio.create_task(_watch_engine(opened, _url(listener), on_ready), name="engine-watch")
    try:
        await asyncio.wait((http, engine, signals.first), return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            await _drain(services, signals)
    finally:
        server.should_exit = True
        await http
        engine.cancel()
        await asyncio.wait((engine,))
    if not engine.cancelled():
        engine.result()


class _Server(uvicorn.Server):
    """Leaves the signals to us: while requests finish, the port still answers, with 503 for new work."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """Counts SIGTERM and SIGINT. `first` asks to end well, `second` to end now."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        self._loop = loop

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def cancelling_start(self) -> Iterator[Callable[[], object]]:
        """Inside, the first signal cancels the current task, without an error; no longer once the yielded is called."""
        task = asyncio.current_task()
        assert task is not None
        cancel = functools.partial(_cancel_task, task)
        self.first.add_done_callback(cancel)
        try:
            yield lambda: self.first.remove_done_callback(cancel)
        except asyncio.CancelledError:
            if not self.first.done():
                raise
            logger.info("stopped while starting")

    def _on_signal(self) -> None:
        future = self.second if self.first.done() else self.first
        if not future.done():
            future.set_result(None)


def _listen(host: str, port: int) -> socket.socket:
    """Taken before anything else, so that a busy port is told at once."""
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=2048)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"cannot listen on {host}:{port}: {reason}; give another --port (0 takes a free one) or --host",
            param="port",
        ) from error
    # Accepted connections inherit it. Without it the second write of a reply waits 40 ms for the first one's
    # acknowledgement; asyncio sets it only on sockets whose protocol number was given.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _uvicorn_config(services: Services) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(services),
        lifespan="off",
        log_config=None,
        ws="none",
        access_log=False,  # each inference request is logged when it ends, each change is in the audit
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(LAST_WORDS_S),
    )


async def _watch_engine(opened: Opened, url: str, on_ready: OnReady) -> None:
    """Returns never; raises what ends the server."""
    await opened.engine_start
    on_ready(opened.services, url)
    services = opened.services
    await services.tenants.finish_deletions(services.registry.remove_tenant)
    report = await opened.engine.crashed()
    last = ", ".join(report.last_request_ids) or "none"
    raise EngineGivenUpError(f"{report.message}; the last requests were: {last}")


def _cancel_task(task: asyncio.Task[None], _: asyncio.Future[None]) -> None:
    task.cancel()


async def _drain(services: Services, signals: _Signals) -> None:
    """No new work; what runs has the grace to finish, or until a second signal. Answers are then told they were cut."""
    services.is_draining = True
    grace_s = services.settings.shutdown_grace_s
    logger.info("shutting down: %d requests have up to %g s to finish", len(services.in_progress), grace_s)
    idle = asyncio.ensure_future(services.in_progress.wait_idle())
    await asyncio.wait((idle, signals.second), timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        logger.warning("%d requests did not finish in time and are aborted", len(services.in_progress))
        services.running.cancel_all()
        await asyncio.wait((idle,), timeout=LAST_WORDS_S)
    idle.cancel()
