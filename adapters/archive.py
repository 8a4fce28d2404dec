"""From an uploaded zip to a flat folder of allowed files."""

from __future__ import annotations

import io
import stat
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from loraplex.adapters.errors import AdapterRefusedError
from loraplex.adapters.file_names import (
    CONFIG_FILE,
    check_file_name,
    check_path,
    dropped_file_warning,
    is_inspected_file,
    is_version_file,
    tar_refusal,
)
from loraplex.adapters.folder import open_regular
from loraplex.adapters.refusals import Refusals, refused, shown

_CHUNK_BYTES = 1 << 20
_SMALL_FILE_BYTES = 1 << 20  # below this a high ratio is harmless
_MAX_FOLDER_DEPTH = 2
_ALLOWED_COMPRESSION = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveLimits:
    max_entries: int = 1_000
    max_file_bytes: int = 4 << 30
    max_total_bytes: int = 8 << 30
    max_ratio: int = 200  # decompressed / compressed, for entries above 1 MiB


def unpack_zip(path: Path, target_dir: Path, limits: ArchiveLimits) -> list[str]:
    """Write the allowed files of the zip at `path` flat into `target_dir`; return warnings.

    adapter_config.json may lie in a folder of the zip; only files beside it are taken. Every entry is judged by
    the directory of the zip before the first byte is decompressed.

    Raises:
        AdapterRefusedError: with every reason that was found; `target_dir` may then hold some files.
    """
    refusals = Refusals()
    with open_regular(path) as file:
        _refuse_tar(file, path.name)
        try:
            with zipfile.ZipFile(_BoundedReader(io.FileIO(file.fileno(), closefd=False))) as archive:
                entries = archive.infolist()
                _check_entries(entries, limits, refusals)
                refusals.raise_if_any()
                return _extract(archive, entries, target_dir)
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
            message = f"{shown(path.name)} is not a readable zip: {error}"
            raise refused("archive_corrupt", message, remedy="make the zip again and upload it whole") from error


class _BoundedReader(io.BufferedReader):
    """Bounds a single read, and with it the zip's directory, which zipfile reads and parses in one piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        is_bounded = size is not None and 0 <= size <= _CHUNK_BYTES
        data = super().read(size if is_bounded else _CHUNK_BYTES + 1)
        if len(data) > _CHUNK_BYTES:
            raise zipfile.BadZipFile(f"its directory is larger than {_CHUNK_BYTES} bytes: too many files")
        return data


def _refuse_tar(file: BinaryIO, name: str) -> None:
    head = file.read(512)
    file.seek(0)
    is_compressed = head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd"))
    if is_compressed or head[257:262] == b"ustar":
        raise AdapterRefusedError([tar_refusal(name)])


def _check_entries(entries: list[zipfile.ZipInfo], limits: ArchiveLimits, refusals: Refusals) -> None:
    if len(entries) > limits.max_entries:
        refusals.add("archive_too_many_files", f"the zip has too many files: {len(entries)} > {limits.max_entries}")
        return
    total = sum(entry.file_size for entry in entries)
    if total > limits.max_total_bytes:
        message = f"the zip decompresses to {total} bytes; at most {limits.max_total_bytes} are allowed"
        refusals.add("archive_too_large", message)
    for name, num in Counter(entry.orig_filename for entry in entries).items():
        if num > 1:
            refusals.add("archive_duplicate", f"the zip has {shown(name)} {num} times", file=name)
    for entry in entries:
        _check_entry(entry, limits, refusals)


def _check_entry(entry: zipfile.ZipInfo, limits: ArchiveLimits, refusals: Refusals) -> None:
    name = entry.orig_filename  # `filename` is cut at a NUL
    unsafe = check_path(name.rstrip("/") if entry.is_dir() else name, allow_folders=True)
    if unsafe is not None:
        refusals.add_reason(unsafe)
        return
    file_type = stat.S_IFMT(entry.external_attr >> 16)
    if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
        refusals.add("archive_link", f"{shown(name)} is a link or a device; only regular files are allowed", file=name)
    if entry.flag_bits & 0x1:
        refusals.add("archive_encrypted", f"{shown(name)} is encrypted", file=name, remedy="zip without a password")
    if entry.compress_type not in _ALLOWED_COMPRESSION:
        message = f"{shown(name)} is compressed by method {entry.compress_type}; only stored and deflate are allowed"
        refusals.add("archive_compression", message, file=name)
    _check_size(entry, limits, refusals)
    if not entry.is_dir() and (reason := check_file_name(PurePosixPath(name).name)) is not None:
        refusals.add_reason(reason)


def _check_size(entry: zipfile.ZipInfo, limits: ArchiveLimits, refusals: Refusals) -> None:
    name, size = entry.orig_filename, entry.file_size
    if size > limits.max_file_bytes:
        message = f"{shown(name)} decompresses to {size} bytes; at most {limits.max_file_bytes} are allowed"
        refusals.add("archive_too_large", message, file=name)
    elif size > _SMALL_FILE_BYTES and size > limits.max_ratio * max(entry.compress_size, 1):
        message = f"{shown(name)} decompresses to more than {limits.max_ratio} times its size, as a zip bomb does"
        refusals.add("archive_ratio", message, file=name, remedy="upload the file itself, without a zip")


def _extract(archive: zipfile.ZipFile, entries: list[zipfile.ZipInfo], target_dir: Path) -> list[str]:
    files = [entry for entry in entries if not entry.is_dir()]
    root = _find_root(files)
    warnings = []
    for entry in files:
        path = PurePosixPath(entry.filename)
        if path.parent == root and (is_version_file(path.name) or is_inspected_file(path.name)):
            _extract_file(archive, entry, target_dir / path.name)
        elif path.parent != root:
            warnings.append(f"{shown(entry.filename)} lies outside the adapter's folder and was left out")
        elif (warning := dropped_file_warning(path.name)) is not None:
            warnings.append(warning)
    return warnings


def _find_root(files: list[zipfile.ZipInfo]) -> PurePosixPath:
    """The folder of the zip that holds its only adapter_config.json."""
    configs = [path for file in files if (path := PurePosixPath(file.filename)).name == CONFIG_FILE]
    if len(configs) == 1 and len(configs[0].parts) <= 1 + _MAX_FOLDER_DEPTH:
        return configs[0].parent
    where = ", ".join(shown(str(path)) for path in configs[:5])
    message = f"the zip has {len(configs)} adapter_config.json ({where})" if configs else f"{CONFIG_FILE} is missing"
    code = "config_ambiguous" if configs else "config_missing"
    raise refused(
        code, message, file=CONFIG_FILE, remedy="zip one adapter's folder, with adapter_config.json at its top"
    )


def _extract_file(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    # zipfile yields no more than the entry's declared size, which was checked, and verifies its CRC.
    with archive.open(entry) as source, open(target, "xb") as sink:
        while chunk := source.read(_CHUNK_BYTES):
            sink.write(chunk)
