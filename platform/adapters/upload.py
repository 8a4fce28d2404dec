"""Receives an upload while it streams in: multipart field `files`, or a raw zip. Never buffers, never spools.

Every byte is counted before it is parsed, hashed while it is written, and gone if the upload is not accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.adapters.archive import ArchiveLimits, unpack_zip
from loraplex.adapters.digest import hash_file
from loraplex.adapters.errors import InvalidRequestError, LoraplexError
from loraplex.adapters.folder import version_files
from loraplex.platform.adapters.disk import on_disk, uninterrupted
from loraplex.platform.adapters.multipart import MultipartFiles
from loraplex.platform.adapters.received_files import ReceivedFiles
from loraplex.platform.adapters.upload_space import UploadArea, too_large
from loraplex.platform.errors import UnsupportedMediaTypeError, http_status
from loraplex.platform.http.refusal import refuse
from loraplex.platform.storage.manifest import StoredFile

MULTIPART = "multipart/form-data"
ZIP = "application/zip"
STALL_TIMEOUT_S = 60.0
MAX_FILES = 256


async def read_upload(request: Request, area: UploadArea) -> ReadUpload:
    """Read the body into `area`.

    Raises:
        UnsupportedMediaTypeError: neither multipart nor zip.
        PayloadTooLargeError: at most one chunk after the cap.
        InvalidRequestError: a malformed or stalled body, or fields that are not known.
    """
    _check_head(request, area)
    sink = await uninterrupted(on_disk, _open_sink, request.headers.get("content-type", ""), area)
    try:
        async for chunk in _chunks(request):
            area.take(len(chunk))
            await uninterrupted(on_disk, sink.write, chunk)
    except BaseException:
        await _close(sink)
        raise
    return ReadUpload(sink, area)


class ReadUpload:
    """A body that was read to its end."""

    def __init__(self, sink: _Sink, area: UploadArea) -> None:
        self._sink = sink
        self._area = area

    async def unpack(self) -> ReceivedFiles:
        """Those files in the area that make a version.

        Raises AdapterRefusedError for names that must not be in an upload and for a hostile archive,
        InvalidRequestError for a body that ends too early.
        """
        try:
            if self._sink.is_archive:
                self._area.reserve_for_unpacking()
            received = await uninterrupted(on_disk, self._sink.finish)
        finally:
            await _close(self._sink)
        return received.only(version_files(self._area.files))


class Refusal(Response):
    """Says no to an upload that was not read to its end, and gets rid of the rest."""

    def __init__(self, error: LoraplexError) -> None:
        super().__init__(status_code=http_status(type(error)))
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await refuse(scope, receive, send, self._error)


class _Sink(Protocol):
    @property
    def is_archive(self) -> bool: ...

    def write(self, chunk: bytes) -> None: ...

    def finish(self) -> ReceivedFiles:
        """What is in the files' folder now."""
        ...

    def close(self) -> None: ...


class _ZipFile:
    """A raw zip body."""

    is_archive = True

    def __init__(self, area: UploadArea) -> None:
        self._area = area
        self._path = area.folder / "upload.zip"
        self._file = self._path.open("xb")

    def write(self, chunk: bytes) -> None:
        self._file.write(chunk)

    def finish(self) -> ReceivedFiles:
        self._file.close()
        return unpack(self._path, self._area)

    def close(self) -> None:
        self._file.close()


def unpack(path: Path, area: UploadArea) -> ReceivedFiles:
    """Unpack the zip at `path` into the area and hash its files; the zip itself is removed."""
    limits = ArchiveLimits(max_file_bytes=area.max_bytes, max_total_bytes=area.max_bytes)
    warnings = unpack_zip(path, area.files, limits)
    path.unlink()
    files = {file.name: StoredFile(sha256=hash_file(file), size=file.stat().st_size) for file in area.files.iterdir()}
    return ReceivedFiles(files=files, warnings=warnings)


def _check_head(request: Request, area: UploadArea) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise UnsupportedMediaTypeError("content-encoding is not supported; send the files as they are, or a zip")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared) > area.max_bytes:
        raise too_large(area.max_bytes)


def _open_sink(content_type: str, area: UploadArea) -> _Sink:
    kind, options = parse_options_header(content_type)
    if kind.lower() == ZIP.encode():
        return _ZipFile(area)
    if kind.lower() != MULTIPART.encode():
        raise UnsupportedMediaTypeError(
            f"send the files as {MULTIPART} in the field `files`, or as one {ZIP}; nothing is fetched from elsewhere",
            param="content-type",
        )
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequestError(f"{MULTIPART} needs a boundary", param="content-type")
    return MultipartFiles(boundary, area, max_files=MAX_FILES, unpack=unpack)


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(STALL_TIMEOUT_S):
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise InvalidRequestError(f"no data came for {STALL_TIMEOUT_S:g} seconds") from error
        yield chunk


async def _close(sink: _Sink) -> None:
    """Whether the last bytes still reach the disk (a full one takes none) is nobody's concern now."""
    with contextlib.suppress(OSError):
        await uninterrupted(sink.close)
