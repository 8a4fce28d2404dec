"""The engine process's way to the adapters' files: store -> checked folder in a bounded cache. No SQL."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections import deque
from pathlib import Path
from threading import Lock

import msgspec
import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore

from loraplex.adapters.digest import hash_file, version_digest
from loraplex.adapters.errors import AdapterLoadError, AdapterRefusedError
from loraplex.adapters.file_names import is_version_file
from loraplex.adapters.turns import PIECE_BYTES, Piece, unpaced
from loraplex.platform.storage.manifest import Manifest, StoredFile
from loraplex.platform.storage.object_store import blob_path, manifest_path, open_object_store

_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_MANIFEST_BYTES = 1 << 20
_NUM_PROTECTED = 16  # more than there are loader threads: what was just handed out is being read

logger = logging.getLogger(__name__)


def create_source(*, store_url: str, cache_dir: str, max_cache_bytes: int) -> StoreSource:
    """Build the source in the engine process from JSON-able options (`ArtifactStore.source_options`)."""
    return StoreSource(open_object_store(store_url), Path(cache_dir), max_cache_bytes=max_cache_bytes)


class StoreSource:
    """Implements `adapters.source.AdapterSource`.

    The cache holds one folder per version, published by a rename, so that a folder with a digest's name was once
    complete; every fetch hashes the files again, whether they were cached or not. The folders least recently
    fetched go when the cache is over its bound.
    """

    def __init__(self, store: ObjectStore, cache_dir: Path, *, max_cache_bytes: int) -> None:
        self._store = store
        self._cache_dir = cache_dir
        self._max_cache_bytes = max_cache_bytes
        self._handed_out: deque[str] = deque(maxlen=_NUM_PROTECTED)
        self._lock = Lock()  # of `_handed_out`, and of what removes folders
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for leftover in cache_dir.glob("tmp-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise AdapterLoadError(f"{digest!r:.80} is not the digest of a version")
        with self._lock:
            self._handed_out.append(digest)
        folder = self._cache_dir / digest
        if not self._is_intact(folder, piece):
            with self._lock:  # an eviction looks into every folder
                shutil.rmtree(folder, ignore_errors=True)
            self._download(digest, folder, piece)
            self._evict()
        os.utime(folder)
        return folder

    def _is_intact(self, folder: Path, piece: Piece) -> bool:
        """Whether the cached folder holds exactly the version's files."""
        try:
            files = {name: hash_file(folder / name, piece) for name in os.listdir(folder)}
        except FileNotFoundError:
            return False
        except (OSError, AdapterRefusedError) as error:
            logger.warning("cached adapter %s cannot be read (%s); fetching it again", folder.name, error)
            return False
        if version_digest(files) == folder.name:
            return True
        logger.warning("cached adapter %s was altered on disk; fetching it again", folder.name)
        return False

    def _download(self, digest: str, folder: Path, piece: Piece) -> None:
        try:
            manifest = self._read_manifest(digest)
            temporary = Path(tempfile.mkdtemp(prefix="tmp-", dir=self._cache_dir))
            try:
                for name, file in manifest.files.items():
                    self._download_file(name, file, temporary / name, piece)
                _publish(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except FileNotFoundError as error:
            raise AdapterLoadError(f"files of the adapter version {digest[:12]} are missing from the store") from error
        except (BaseError, OSError) as error:
            reason = str(error).partition("\n")[0]
            raise AdapterLoadError(f"the adapter version {digest[:12]} cannot be fetched: {reason}") from error

    def _read_manifest(self, digest: str) -> Manifest:
        found = obstore.get(self._store, manifest_path(digest))
        if found.meta["size"] > _MAX_MANIFEST_BYTES:
            raise _altered(digest, "its manifest")
        try:
            manifest = msgspec.json.decode(bytes(found.bytes()), type=Manifest)
            proven = version_digest({name: file.sha256 for name, file in manifest.files.items()})
        except ValueError as error:
            raise _altered(digest, "its manifest") from error
        if proven != digest or not all(is_version_file(name) for name in manifest.files):
            raise _altered(digest, "its manifest")
        return manifest

    def _download_file(self, name: str, file: StoredFile, target: Path, piece: Piece) -> None:
        found = obstore.get(self._store, blob_path(file.sha256))
        if found.meta["size"] != file.size:
            raise _altered(file.sha256, name)
        hasher = hashlib.sha256()
        with target.open("xb") as output:
            for chunk in found.stream(min_chunk_size=PIECE_BYTES):
                _hash(hasher, memoryview(chunk), piece)
                output.write(chunk)
        if hasher.hexdigest() != file.sha256:
            raise _altered(file.sha256, name)

    def _evict(self) -> None:
        with self._lock:
            folders = sorted(self._cache_dir.glob("[0-9a-f]*"), key=lambda folder: folder.stat().st_mtime_ns)
            sizes = {folder: sum(file.stat().st_size for file in folder.iterdir()) for folder in folders}
            total = sum(sizes.values())
            for folder, size in sizes.items():
                if total <= self._max_cache_bytes:
                    return
                if folder.name not in self._handed_out:
                    shutil.rmtree(folder, ignore_errors=True)
                    total -= size


def _hash(hasher: hashlib._Hash, chunk: memoryview, piece: Piece) -> None:
    """A store may give more at once than was asked for."""
    for start in range(0, len(chunk), PIECE_BYTES):
        with piece():
            hasher.update(chunk[start : start + PIECE_BYTES])


def _publish(temporary: Path, folder: Path) -> None:
    try:
        temporary.rename(folder)
    except OSError:
        if not folder.is_dir():  # else: another thread was faster, with the same bytes
            raise


def _altered(digest: str, what: str) -> AdapterLoadError:
    return AdapterLoadError(
        f"{what} in the store does not match the sha256 {digest[:12]} that it was uploaded with; upload it again"
    )
