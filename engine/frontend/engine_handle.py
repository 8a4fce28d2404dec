"""The parent's hold on one engine process: starts it, listens to it, notices its end, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.channel import ClientChannel, EngineLaunch
from loraplex.engine.frontend.child_environment import child_environment
from loraplex.engine.frontend.session import EngineSession, error_of
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.messages import EngineFailed, EngineInfo

logger = logging.getLogger(__name__)

_STDERR = 2
# What an engine said before its end is still on its way through the socket: for so long after a signal, and until it
# has said EngineFailed, but no longer than that, after an exit.
IN_FLIGHT_S = 0.1
FAREWELL_S = 1.0
TERMINATE_TIMEOUT_S = 5.0
MAX_SOCKET_PATH = 90  # the kernel allows 107 bytes, names of the sockets included


class EngineHandle:
    """One engine process. Start it with `start`; `session` talks to it; `ended` returns when it is gone."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ClientChannel, folder: Path) -> None:
        self._process = process
        self._channel = channel
        self._folder = folder
        self.session = EngineSession(channel.send)
        self._first: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(), name="engine-events")
        self._watcher = asyncio.create_task(self._watch(), name="engine-watch")

    @classmethod
    async def start(cls, config: EngineConfig, source: SourceSpec) -> EngineHandle:
        """Spawn an engine and wait until it is ready. No time limit: a large model takes what it takes.

        Raises:
            ConfigurationError: what the engine says of its settings or its model.
            EngineDeadError: it ended for another reason.
        """
        folder = make_socket_folder()
        channel = ClientChannel(folder)
        try:
            process = await _spawn()
        except BaseException:
            channel.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        handle = cls(process, channel, folder)
        try:
            handle._hand_over(
                EngineLaunch(
                    config=config,
                    source=source,
                    socket_folder=str(folder),
                    parent_pid=os.getpid(),
                    log_level=logging.getLogger("loraplex").getEffectiveLevel(),
                )
            )
            await asyncio.shield(handle._first)
        except BaseException:  # also when the start is cancelled: no engine is left behind
            await handle.end()
            raise
        return handle

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Wait for the process's end; its exit status (negative: the signal). Every stream has failed by then."""
        await asyncio.shield(self._watcher)
        assert self._process.returncode is not None
        return self._process.returncode

    async def end(self) -> None:
        """End the process now, with all its streams, and remove the sockets."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), TERMINATE_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await self._watcher

    def _hand_over(self, launch: EngineLaunch) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(launch))
        stdin.close()

    async def _read(self) -> None:
        """Until the engine's last words, or until `_watch` knows that there are none."""
        try:
            while not isinstance(event := await self._channel.receive(), EngineFailed):
                self.session.deliver(event)
                if isinstance(event, EngineInfo):
                    self._first.set_result(event)
        except msgspec.MsgspecError as error:  # an engine of another version: nobody can talk to it
            logger.error("the engine says what cannot be read: %s", error)
            self._process.kill()
            return
        self.session.deliver(event)
        if not self._first.done():
            self._first.set_exception(error_of(event.error))

    async def _watch(self) -> None:
        returncode = await self._process.wait()
        await asyncio.wait([self._reader], timeout=IN_FLIGHT_S if returncode < 0 else FAREWELL_S)
        self._reader.cancel()
        error: LoraplexError = EngineDeadError(f"the engine process ended ({_status(returncode)})")
        self.session.fail(error)
        if not self._first.done():
            self._first.set_exception(error)
        self._first.exception()  # seen, also when nobody waits for the start any more
        self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)


async def _spawn() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # never import what lies in the folder that the server was started in
        "-m",
        "loraplex.engine.frontend.engine_process",
        stdin=asyncio.subprocess.PIPE,
        stdout=_STDERR,  # nothing but logs: never mixed into the parent's output
        env=child_environment(os.environ),
        start_new_session=True,  # a Ctrl-C in the terminal is the parent's to decide on
    )


def make_socket_folder() -> Path:
    """A fresh folder of mode 0700; in /tmp when the usual place makes the socket's path too long."""
    usual = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="loraplex-", dir=usual if len(usual) < MAX_SOCKET_PATH - 20 else "/tmp"))


def _status(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
