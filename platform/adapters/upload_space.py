"""Where uploads lie until they are checked: bounded, and empty again whatever happens."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from loraplex.platform.adapters.disk import on_disk, uninterrupted
from loraplex.platform.errors import PayloadTooLargeError, ServiceUnavailableError

_LOCK_NAME = "lock"
_NUM_LARGEST_AT_ONCE = 8

logger = logging.getLogger(__name__)


class UploadSpace:
    """A folder per server process, and in it one per upload.

    A process holds the lock of its folder as long as it lives, so a starting one can tell what was left behind by
    processes that were killed, and removes just that.
    """

    def __init__(self, folder: Path, *, max_upload_bytes: int, quota_bytes: int | None = None) -> None:
        self.max_upload_bytes = max_upload_bytes
        self._quota_bytes = quota_bytes or _NUM_LARGEST_AT_ONCE * max_upload_bytes
        self._num_bytes = 0  # of all uploads that are under way
        self._folder = folder
        self._own_folder: Path | None = None
        self._lock_fd: int | None = None

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in self._folder.iterdir():
            if _is_abandoned(leftover):
                logger.warning("removing uploads that an ended process left behind: %s", leftover.name)
                shutil.rmtree(leftover, ignore_errors=True)
        self._own_folder = Path(tempfile.mkdtemp(dir=self._folder))
        self._lock_fd = _try_lock(self._own_folder)

    def close(self) -> None:
        if self._own_folder is not None and self._lock_fd is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)
            os.close(self._lock_fd)
            self._own_folder = self._lock_fd = None

    @asynccontextmanager
    async def allocate(self) -> AsyncIterator[UploadArea]:
        """Room for one upload; its files are gone when the block ends. Raises StorageError if the disk gives none."""
        area = await uninterrupted(on_disk, self._make_area)
        try:
            yield area
        finally:
            await _remove(area.folder)
            self._num_bytes -= area.num_bytes + area.num_reserved

    def _make_area(self) -> UploadArea:
        assert self._own_folder is not None, "open the space first"
        return UploadArea(Path(tempfile.mkdtemp(dir=self._own_folder)), self)

    def take(self, num_bytes: int) -> None:
        """Raise ServiceUnavailableError when all uploads together would be over the quota."""
        if self._num_bytes + num_bytes > self._quota_bytes:
            raise ServiceUnavailableError("too many uploads at once; send it again in some seconds")
        self._num_bytes += num_bytes


class UploadArea:
    """The room of one upload: `folder` for its archive, `files` for what will be a version."""

    def __init__(self, folder: Path, space: UploadSpace) -> None:
        self.folder = folder
        self.files = folder / "files"
        self.files.mkdir()
        self.max_bytes = space.max_upload_bytes
        self.num_bytes = 0
        self.num_reserved = 0
        self._space = space

    def take(self, num_bytes: int) -> None:
        """Account for bytes before they are written.

        Raises PayloadTooLargeError past the cap of one upload, ServiceUnavailableError past the quota of all.
        """
        if self.num_bytes + num_bytes > self.max_bytes:
            raise too_large(self.max_bytes)
        self._space.take(num_bytes)
        self.num_bytes += num_bytes

    def reserve_for_unpacking(self) -> None:
        """Account for what an archive may hold. Raises ServiceUnavailableError past the quota of all uploads."""
        self._space.take(self.max_bytes)
        self.num_reserved += self.max_bytes


def too_large(max_bytes: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"the upload is longer than {max_bytes} bytes, the most that this server takes")


async def _remove(folder: Path) -> None:
    await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def _is_abandoned(folder: Path) -> bool:
    fd = _try_lock(folder)
    if fd is None:
        return False
    os.close(fd)
    return True


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed or the process ends; None if another has it."""
    fd = os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd
