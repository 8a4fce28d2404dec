"""The end of versions: the last request leaves, the engine forgets, the files go, then the row."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.frontend.protocol import EngineClient
from loraplex.platform.adapters.references import References
from loraplex.platform.adapters.repository import READY, RETIRED, UPLOADING, AdapterRepository
from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.keyed_lock import KeyedLock
from loraplex.platform.storage.artifact_store import ArtifactStore

logger = logging.getLogger(__name__)


class Removals:
    """Removes retired versions in the background. The row goes last, so that a restart resumes what was not done.

    Bytes and slots are shared by digest: they go only with the last version that has them. `publishing` is held by
    whoever announces bytes in a row, and here from the look at the rows until the bytes are gone, so that an upload
    never counts on bytes which are just being removed.
    """

    def __init__(
        self,
        *,
        database: Database,
        store: ArtifactStore,
        engine: EngineClient,
        references: References,
        residency_lock: KeyedLock,
    ) -> None:
        self._database = database
        self._store = store
        self._engine = engine
        self._references = references
        self._residency_lock = residency_lock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.publishing = asyncio.Lock()

    def begin(self, version_ids: Iterable[str]) -> list[asyncio.Task[None]]:
        """Start to remove versions that are retired in the database, each once."""
        return [self._begin(version_id) for version_id in version_ids]

    async def resume(self) -> None:
        """Go on with what an earlier process began to remove, or did not finish to upload."""
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            left = await repository.owned_versions(AdapterVersion.status.in_([RETIRED, UPLOADING]))
            version_ids = [owned.version.id for owned in left]
            await repository.set_status(version_ids, RETIRED)
        self.begin(version_ids)

    async def wait(self) -> None:
        """Return when every removal that has begun is done."""
        while self._tasks:
            await asyncio.wait(self._tasks.values())

    async def aclose(self) -> None:
        """Leave the rest to the next start."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, version_id: str) -> asyncio.Task[None]:
        if version_id not in self._tasks:
            task = asyncio.create_task(self._remove(version_id), name=f"remove {version_id}")
            task.add_done_callback(lambda done: self._finished(version_id, done))
            self._tasks[version_id] = task
        return self._tasks[version_id]

    def _finished(self, version_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[version_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("removing version %s failed; the next start tries again", version_id, exc_info=error)

    async def _remove(self, version_id: str) -> None:
        await self._references.wait_drained(version_id)
        async with self._database.read_session() as session:
            version = await AdapterRepository(session).version_by_id(version_id)
        if version is None:
            return
        await self._forget_in_engine(version)
        async with self.publishing:
            await self._erase(version)
        logger.info("version removed: id=%s digest=%s", version.id, version.digest)

    async def _forget_in_engine(self, version: AdapterVersion) -> None:
        async with self._residency_lock.hold(version.digest):
            async with self._database.read_session() as session:
                repository = AdapterRepository(session)
                is_served = await repository.has_other_owner(version, AdapterVersion.status == READY)
                is_pinned = await repository.has_other_owner(
                    version, AdapterVersion.status == READY, AdapterVersion.pinned.is_(True)
                )
            try:
                if version.pinned and not is_pinned:
                    await self._engine.unpin_adapter(version.digest)
                if not is_served:
                    await self._engine.unload_adapter(version.digest)
            except LoraplexError as error:  # an engine that died holds nothing
                logger.warning("engine could not forget %s: %s", version.digest, error)

    async def _erase(self, version: AdapterVersion) -> None:
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            has_twin = await repository.has_other_owner(version)
            blobs = await repository.unshared_blobs(version)
        if not has_twin:
            await self._store.delete_version(version.digest)
        await self._store.delete_blobs(blobs)
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            await repository.delete_version(version.id)
            await repository.close_empty_adapter(version.adapter_id)
