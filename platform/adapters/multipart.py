"""Files out of a multipart body, pushed in chunk by chunk and written as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from loraplex.adapters.errors import AdapterRefusedError, InvalidRequestError, Reason
from loraplex.adapters.file_names import check_file_name, dropped_file_warning, is_inspected_file, is_version_file
from loraplex.platform.adapters.naming import shown
from loraplex.platform.adapters.received_files import ReceivedFiles
from loraplex.platform.adapters.upload_space import UploadArea
from loraplex.platform.storage.manifest import StoredFile

FIELD = "files"
_ZIP_SUFFIX = ".zip"
_MAX_NAME_BYTES = 255

Unpack = Callable[[Path, UploadArea], ReceivedFiles]


class MultipartFiles:
    """The folder's files, or one zip, in parts named `files`.

    What the version needs is written; harmless company (a README) is read and dropped; names that refuse the upload
    are collected, and their content is dropped unseen.
    """

    def __init__(self, boundary: bytes, area: UploadArea, *, max_files: int, unpack: Unpack) -> None:
        self._area = area
        self._max_files = max_files
        self._unpack = unpack
        self._names: set[str] = set()
        self._reasons: list[Reason] = []
        self._warnings: list[str] = []
        self._written: dict[str, StoredFile] = {}
        self._archive: Path | None = None
        self._headers = _PartHeaders()
        self._part: _PartFile | None = None  # None while what comes is dropped
        self._is_complete = False
        self._parser = _open_parser(boundary, self)

    @property
    def is_archive(self) -> bool:
        return self._archive is not None

    def write(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise InvalidRequestError(f"the multipart body is malformed: {error}") from error

    def finish(self) -> ReceivedFiles:
        """Raises AdapterRefusedError with every name that must not be in an upload."""
        if not self._is_complete:
            raise InvalidRequestError("the multipart body ends before its closing boundary")
        if self._reasons:
            raise AdapterRefusedError(self._reasons)
        if not self._names:
            raise InvalidRequestError(f"the body holds no file; send the adapter's files in the field `{FIELD}`")
        if self._archive is None:
            return ReceivedFiles(files=self._written, warnings=self._warnings)
        if len(self._names) > 1:
            raise InvalidRequestError("send the folder's files, or one zip of them, not both")
        return self._unpack(self._archive, self._area)

    def close(self) -> None:
        if self._part is not None:
            self._part.close()

    def on_part_begin(self) -> None:
        self._headers = _PartHeaders()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._headers.name += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers.value += data[start:end]

    def on_header_end(self) -> None:
        self._headers.end_line()

    def on_headers_finished(self) -> None:
        name = self._headers.file_name()
        if name in self._names:
            raise InvalidRequestError(f"the file {shown(name)} comes twice", param=FIELD)
        if len(self._names) >= self._max_files:
            raise InvalidRequestError(f"more than {self._max_files} files", param=FIELD)
        self._names.add(name)
        target = self._target(name)
        self._part = None if target is None else _PartFile(name, target)

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part is not None:
            self._part.write(memoryview(data)[start:end])

    def on_part_end(self) -> None:
        if self._part is not None:
            self._written[self._part.name] = self._part.close()
            self._part = None

    def on_end(self) -> None:
        self._is_complete = True

    def _target(self, name: str) -> Path | None:
        """Where the file goes; None = nowhere."""
        if name.lower().endswith(_ZIP_SUFFIX):
            self._archive = self._area.folder / "upload.zip"
            return self._archive
        reason = check_file_name(name)
        if reason is not None:
            self._reasons.append(reason)
        elif is_version_file(name) or is_inspected_file(name):
            return self._area.files / name
        elif (warning := dropped_file_warning(name)) is not None:
            self._warnings.append(warning)
        return None


class _PartHeaders:
    """Header lines of one part. Their number and lengths are bounded by the parser."""

    def __init__(self) -> None:
        self.name = b""
        self.value = b""
        self._disposition = b""

    def end_line(self) -> None:
        if self.name.lower() == b"content-disposition":
            self._disposition = self.value
        self.name = self.value = b""

    def file_name(self) -> str:
        """Raises InvalidRequestError for a part that is no file of the field `files`."""
        _, options = parse_options_header(self._disposition)
        field = options.get(b"name", b"").decode(errors="replace")
        if field != FIELD:
            raise InvalidRequestError(
                f"the field {shown(field)} is not known; send the adapter's files in the field `{FIELD}`", param="body"
            )
        name = options.get(b"filename", b"")
        if not 0 < len(name) <= _MAX_NAME_BYTES:
            raise InvalidRequestError(f"a part has no file name, or one above {_MAX_NAME_BYTES} bytes", param=FIELD)
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            raise InvalidRequestError("a file name is not UTF-8", param=FIELD) from error


class _PartFile:
    """One file on its way to disk, hashed as it passes."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self._file = path.open("xb")
        self._hasher = hashlib.sha256()

    def write(self, data: memoryview) -> None:
        self._hasher.update(data)
        self._file.write(data)

    def close(self) -> StoredFile:
        with self._file:
            return StoredFile(sha256=self._hasher.hexdigest(), size=self._file.tell())


def _open_parser(boundary: bytes, files: MultipartFiles) -> MultipartParser:
    try:
        return MultipartParser(
            boundary,
            {
                "on_part_begin": files.on_part_begin,
                "on_header_field": files.on_header_field,
                "on_header_value": files.on_header_value,
                "on_header_end": files.on_header_end,
                "on_headers_finished": files.on_headers_finished,
                "on_part_data": files.on_part_data,
                "on_part_end": files.on_part_end,
                "on_end": files.on_end,
            },
        )
    except FormParserError as error:
        raise InvalidRequestError(f"the multipart boundary is malformed: {error}", param="content-type") from error
