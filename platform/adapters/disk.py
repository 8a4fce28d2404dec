"""Work on the disk: on threads, with the system's refusals as the client is told them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from loraplex.platform.errors import StorageError

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


async def uninterrupted(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run in a thread, and leave only when it has ended, so that nothing is written after the clean-up."""
    task = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen; the cancellation is what counts
        raise


def on_disk(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it. Raises StorageError for what the system refuses: a full disk, a folder that is gone."""
    try:
        return function(*args, **kwargs)
    except OSError as error:
        logger.error("an upload cannot be written: %s", error)
        raise StorageError("the server has no room for the upload; tell the operator") from error
