"""Checks the values of uploads in a process of its own: slow, low in priority, and free to die."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import msgspec

from loraplex.adapters.errors import Reason
from loraplex.platform.errors import ServiceUnavailableError

_MODULE = "loraplex.platform.adapters.validator_process"

logger = logging.getLogger(__name__)


class Validator:
    """One long-lived child, started with the first upload and again after it died. One check at a time."""

    def __init__(self, *, timeout_s: float = 600.0) -> None:
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def check(self, folder: Path) -> list[Reason]:
        """Reasons to refuse the values of the adapter in `folder`.

        Raises ServiceUnavailableError if the process dies over it or takes too long; the next check gets a new one.
        """
        async with self._lock:
            process = await self._running()
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await _ask(process, folder)
            except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as error:
                logger.error("validator process %d failed (%r); it is restarted", process.pid, error)
                await self._stop()
                raise ServiceUnavailableError(
                    "the upload could not be checked: the validator failed; send it again"
                ) from error
            except BaseException:  # cancelled: its answer would be taken for that of the next check
                await self._stop()
                raise

    async def aclose(self) -> None:
        async with self._lock:
            await self._stop()

    async def _running(self) -> Process:
        if self._process is None or self._process.returncode is not None:
            # -I: neither the working folder nor the environment decides what is imported
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-m", _MODULE, stdin=PIPE, stdout=PIPE, env={"LC_ALL": "C.UTF-8"}
            )
        return self._process

    async def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ask(process: Process, folder: Path) -> list[Reason]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(_framed(str(folder).encode()))
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(8), "big")
    return msgspec.msgpack.decode(await process.stdout.readexactly(length), type=list[Reason])


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(8, "big") + message
