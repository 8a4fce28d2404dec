"""Brings versions to host memory on background threads; one read per digest at a time."""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from loraplex.adapters.errors import AdapterLoadError, AdapterRefusedError
from loraplex.adapters.turns import Piece
from loraplex.adapters.weights import AdapterWeights

logger = logging.getLogger(__name__)


class AdapterReader(Protocol):
    """Brings the weights of a version to host memory."""

    def read(self, digest: str, piece: Piece) -> AdapterWeights:
        """Blocking; called from loader threads only. What it computes, it computes within `piece()`.

        Raises:
            AdapterLoadError, AdapterRefusedError, OSError: the version cannot be served.
        """
        ...


class HostLoader:
    """Its methods are for one thread, and none of them blocks."""

    def __init__(self, reader: AdapterReader, piece: Piece, *, num_threads: int) -> None:
        self._reader = reader
        self._piece = piece
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-loader")
        self._futures: dict[str, Future[AdapterWeights]] = {}
        self._discarded: set[str] = set()

    @property
    def loading(self) -> Collection[str]:
        """Digests whose read has begun or is queued, and was not discarded."""
        return self._futures.keys() - self._discarded

    @property
    def has_spare_thread(self) -> bool:
        """A read that begins now leaves at least one thread idle."""
        return len(self._futures) < self._num_threads - 1

    def start(self, digest: str) -> None:
        """Read the version, unless that is under way."""
        self._discarded.discard(digest)
        if digest not in self._futures:
            self._futures[digest] = self._executor.submit(self._reader.read, digest, self._piece)

    def discard(self, digest: str) -> None:
        """Nobody wants the result of a read that may be under way."""
        if digest in self._futures:
            self._discarded.add(digest)

    def poll(self) -> list[tuple[str, AdapterWeights | AdapterLoadError]]:
        """What was read since the last call, in the order in which the reads began."""
        done = [digest for digest, future in self._futures.items() if future.done()]
        outcomes = [(digest, _outcome(self._futures.pop(digest))) for digest in done]
        wanted = [outcome for outcome in outcomes if outcome[0] not in self._discarded]
        self._discarded.difference_update(done)
        return wanted

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _outcome(future: Future[AdapterWeights]) -> AdapterWeights | AdapterLoadError:
    try:
        return future.result()
    except AdapterLoadError as error:
        return error
    except (AdapterRefusedError, OSError) as error:
        return AdapterLoadError(f"the version's files cannot be served: {error}")
    except Exception as error:  # the edge of a thread: a fault here must not stop the engine's step
        logger.exception("reading an adapter failed unexpectedly")
        return AdapterLoadError(f"reading the version failed: {type(error).__name__}: {error}")
