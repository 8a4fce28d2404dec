"""The files of all adapter versions, content-addressed: `blobs/<sha256>`, and one manifest per version."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from loraplex.platform.errors import StorageError
from loraplex.platform.storage.manifest import Manifest, StoredFile
from loraplex.platform.storage.object_store import blob_path, local_folder, manifest_path, open_object_store

_CHUNK_BYTES = 8 << 20
_DEFAULT_CACHE_BYTES = 20 << 30

logger = logging.getLogger(__name__)


class ArtifactStore:
    """Used by the server process; the engine process reads the same objects through `engine_source.StoreSource`.

    Objects never change: what is there already is not written again, and a reader sees whole objects only. All
    failures of the store are StorageError.
    """

    def __init__(self, url: str, *, cache_dir: Path, max_cache_bytes: int = _DEFAULT_CACHE_BYTES) -> None:
        self._url = url
        self._store = open_object_store(url)
        self._cache_dir = cache_dir
        self._max_cache_bytes = max_cache_bytes

    @property
    def source_options(self) -> dict[str, Any]:
        """JSON-able arguments of `engine_source.create_source`. They hold the store's credentials."""
        return {"store_url": self._url, "cache_dir": str(self._cache_dir), "max_cache_bytes": self._max_cache_bytes}

    async def put_version(self, digest: str, folder: Path, files: Mapping[str, StoredFile]) -> None:
        """Copy the version's files from `folder`, then publish its manifest. Harmless when repeated."""
        async with _as_storage_error("write"):
            for name, file in files.items():
                await self._put_blob(folder / name, file)
            await self._create(manifest_path(digest), msgspec.json.encode(Manifest(files=dict(files))))

    async def has_version(self, digest: str) -> bool:
        async with _as_storage_error("read"):
            return await self._size(manifest_path(digest)) is not None

    async def has_blob(self, sha256: str) -> bool:
        async with _as_storage_error("read"):
            return await self._size(blob_path(sha256)) is not None

    async def delete_version(self, digest: str) -> None:
        """Remove the manifest, and the copy that the engine process may have cached on this machine."""
        await self._delete([manifest_path(digest)])
        await asyncio.to_thread(shutil.rmtree, self._cache_dir / digest, ignore_errors=True)

    async def delete_blobs(self, digests: Iterable[str]) -> None:
        """Remove files by their sha256. The caller has made sure that no version refers to them."""
        await self._delete([blob_path(digest) for digest in digests])

    def clean_temporary_files(self) -> None:
        """Remove what a killed process left half written in a local store. Call it before anybody writes."""
        folder = local_folder(self._url)
        if folder is None:
            return  # parts of unfinished uploads are hidden in S3; a lifecycle rule of the bucket removes them
        for leftover in folder.glob("*/*#*"):  # objects are written beside their place as NAME#N
            logger.warning("removing %s, which an ended process left half written", leftover.name)
            leftover.unlink(missing_ok=True)

    async def _put_blob(self, source: Path, file: StoredFile) -> None:
        path = blob_path(file.sha256)
        if await self._size(path) == file.size:
            return
        if file.size <= _CHUNK_BYTES:
            await self._create(path, await asyncio.to_thread(source.read_bytes))
            return
        # Streamed in parts, which stores cannot make conditional. That is safe: equal names hold equal bytes, and
        # the object appears whole or not at all.
        await obstore.put_async(self._store, path, source, use_multipart=True, chunk_size=_CHUNK_BYTES)

    async def _create(self, path: str, content: bytes) -> None:
        try:
            await obstore.put_async(self._store, path, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            if await self._size(path) != len(content):  # damaged behind our back
                await obstore.put_async(self._store, path, content, use_multipart=False)

    async def _size(self, path: str) -> int | None:
        try:
            return (await obstore.head_async(self._store, path))["size"]
        except FileNotFoundError:
            return None

    async def _delete(self, paths: Iterable[str]) -> None:
        async with _as_storage_error("delete"):
            for path in paths:
                try:
                    await obstore.delete_async(self._store, path)
                except FileNotFoundError:
                    continue


@asynccontextmanager
async def _as_storage_error(verb: str) -> AsyncIterator[None]:
    try:
        yield
    except (BaseError, OSError) as error:
        logger.error("artifact store: cannot %s: %s", verb, str(error).partition("\n")[0])
        raise StorageError(f"the artifact store cannot {verb} now; try again, or ask the operator") from error
