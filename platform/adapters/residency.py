"""Load, unload, pin, unpin: what tenants may wish of the engine's memory. Only pins are remembered."""

from __future__ import annotations

import logging

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.protocol import EngineClient
from loraplex.platform.adapters.catalog import Catalog, CatalogVersion
from loraplex.platform.adapters.catalog_loader import CatalogLoader
from loraplex.platform.adapters.naming import unknown_adapter
from loraplex.platform.adapters.repository import READY, AdapterRepository, OwnedVersion
from loraplex.platform.adapters.serving_fit import ServingFit
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.audit.service import record
from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ConflictError
from loraplex.platform.keyed_lock import KeyedLock

logger = logging.getLogger(__name__)


class Residency:
    """Calls for one digest happen one after the other, so that the last acknowledged call is what holds."""

    def __init__(
        self,
        *,
        database: Database,
        engine: EngineClient,
        catalog: Catalog,
        loader: CatalogLoader,
        fit: ServingFit,
        lock: KeyedLock,
    ) -> None:
        self._database = database
        self._engine = engine
        self._catalog = catalog
        self._loader = loader
        self._fit = fit
        self._lock = lock

    async def load(self, tenant: TenantContext, name: str, number: int, *, actor: str) -> None:
        """Make the version resident; return when it is."""
        digest = (await self._find(tenant, name, number)).ref.digest
        async with self._lock.hold(digest):
            version = await self._find(tenant, name, number)  # again: it may have been deleted meanwhile
            self._fit.check(version)
            await self._engine.load_adapter(version.ref)
            await self._record(tenant, version, action="adapter.load", actor=actor)

    async def unload(self, tenant: TenantContext, name: str, number: int, *, actor: str) -> None:
        """Give slots and host copy back; return when the last request that runs through them has ended.

        Where another tenant has the same bytes, they stay his: nothing is waited for, and nothing is told.
        Raises ConflictError while the version is pinned.
        """
        digest = (await self._find(tenant, name, number)).ref.digest
        async with self._lock.hold(digest):
            version = await self._find(tenant, name, number)
            if version.pinned:
                raise ConflictError(f"{version.label} is pinned; DELETE its pin first", param="version")
            if not await self._is_needed_elsewhere(tenant, digest):
                await self._engine.unload_adapter(digest)
            await self._record(tenant, version, action="adapter.unload", actor=actor)

    async def pin(self, tenant: TenantContext, name: str, number: int, *, actor: str) -> None:
        """Resident from now on, and never a victim, also after a restart. Harmless when repeated."""
        digest = (await self._find(tenant, name, number)).ref.digest
        async with self._lock.hold(digest):
            version = await self._find(tenant, name, number)
            self._fit.check(version)
            await self._engine.pin_adapter(version.ref)
            try:
                await self._record(tenant, version, action="adapter.pin", actor=actor, pinned=True)
            except BaseException:
                await self._unpin_in_engine(digest)
                raise
            await self._catalog.refresh(tenant.id, name)

    async def unpin(self, tenant: TenantContext, name: str, number: int, *, actor: str) -> None:
        """A victim like any other from now on. Harmless when repeated."""
        digest = (await self._find(tenant, name, number)).ref.digest
        async with self._lock.hold(digest):
            version = await self._find(tenant, name, number)
            await self._record(tenant, version, action="adapter.unpin", actor=actor, pinned=False)
            await self._catalog.refresh(tenant.id, name)
            await self._unpin_in_engine(digest)

    async def repin(self) -> None:
        """Tell a fresh engine every stored pin. A pin that cannot be kept is logged; it stops nobody."""
        async with self._database.read_session() as session:
            pinned = await AdapterRepository(session).owned_versions(
                AdapterVersion.status == READY, AdapterVersion.pinned.is_(True)
            )
        for version in map(self._loader.catalog_version, pinned):
            try:
                self._fit.check(version)
                await self._engine.pin_adapter(version.ref)
            except LoraplexError as error:
                logger.error("pin of %s in tenant %s cannot be kept: %s", version.label, version.tenant_id, error)

    async def _unpin_in_engine(self, digest: str) -> None:
        """Unless another version with the same bytes is pinned: slots know digests only."""
        if any(owner.version.pinned for owner in await self._owners(digest)):
            return
        try:
            await self._engine.unpin_adapter(digest)
        except EngineDeadError:
            logger.info("unpinned %s while no engine runs: the next one knows no pins", digest)

    async def _is_needed_elsewhere(self, tenant: TenantContext, digest: str) -> bool:
        return any(owner.tenant_id != tenant.id or owner.version.pinned for owner in await self._owners(digest))

    async def _owners(self, digest: str) -> list[OwnedVersion]:
        """The ready versions with these bytes, of whatever tenant."""
        async with self._database.read_session() as session:
            return await AdapterRepository(session).owned_versions(
                AdapterVersion.digest == digest, AdapterVersion.status == READY
            )

    async def _record(
        self, tenant: TenantContext, version: CatalogVersion, *, action: str, actor: str, pinned: bool | None = None
    ) -> None:
        async with self._database.session() as session:
            if pinned is not None:
                await AdapterRepository(session).set_pinned(version.id, pinned=pinned)
            record(session, actor=actor, action=action, target=version.label, tenant=tenant.name)

    async def _find(self, tenant: TenantContext, name: str, number: int) -> CatalogVersion:
        adapter = await self._catalog.get(tenant.id, name)
        version = None if adapter is None else adapter.versions.get(number)
        if version is None:
            raise unknown_adapter(f"{name}@{number}", param="version")
        return version
