"""The engine's own process: `python -m loraplex.engine.frontend.engine_process`, told everything on its stdin.

It never outlives its parent. It ignores SIGINT (a Ctrl-C reaches the whole terminal; the parent decides), and
SIGTERM or the parent's death end it at once, also in the middle of a step.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.frontend.channel import EngineChannel, EngineLaunch
from loraplex.engine.frontend.collector import spare_collector
from loraplex.engine.frontend.engine_loop import EngineLoop
from loraplex.engine.messages import EngineFailed
from loraplex.engine.outputs import ErrorInfo

logger = logging.getLogger(__name__)

EXIT_START_FAILED = 3
EXIT_LOOP_FAILED = 4
_PR_SET_PDEATHSIG = 1
_WATCH_INTERVAL_S = 1.0


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineLaunch)
    logging.basicConfig(level=launch.log_level, format="%(asctime)s %(levelname)s engine[%(process)d] %(message)s")
    end_with_parent(launch.parent_pid)
    channel = EngineChannel(Path(launch.socket_folder))
    try:
        return _serve(launch, channel)
    finally:
        channel.close()


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL at the parent's death, and watch the parent where the kernel cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent_pid,), name="parent-watch", daemon=True).start()


def _watch_parent(parent_pid: int) -> None:
    while os.getppid() == parent_pid:  # the first look also catches a parent that died before prctl
        time.sleep(_WATCH_INTERVAL_S)
    os._exit(1)


def _serve(launch: EngineLaunch, channel: EngineChannel) -> int:
    try:
        # Torch is imported here: a failure to import it is a start failure like any other.
        from loraplex.engine.build import build_engine_core

        core, info = build_engine_core(launch.config, launch.source.create())
    except Exception as error:  # the edge of the process: the parent is told, whatever it was
        logger.error("the engine could not start: %s", error, exc_info=not isinstance(error, LoraplexError))
        channel.send(EngineFailed(_error_info(error), []))
        return EXIT_START_FAILED
    spare_collector()
    channel.send(info)
    try:
        EngineLoop(core, receive=channel.receive, send=channel.send).run()
    except Exception as error:  # the edge of the process: a bug in a step ends the engine, and is told
        request_ids = core.scheduler.running_request_ids
        logger.exception("the engine failed; in the batch: %s", ", ".join(request_ids) or "nothing")
        channel.send(EngineFailed(_error_info(error), request_ids))
        return EXIT_LOOP_FAILED
    return 0


def _error_info(error: Exception) -> ErrorInfo:
    if isinstance(error, LoraplexError):
        return ErrorInfo(error.code, error.message)
    return ErrorInfo("engine_dead", f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # a loader thread may hang in a fetch, and a dead engine must not look alive for it
