"""Reads one adapter from SQL for the catalog."""

from __future__ import annotations

from loraplex.platform.adapters.catalog import CatalogAdapter, CatalogVersion
from loraplex.platform.adapters.facts import adapter_ref
from loraplex.platform.adapters.repository import AdapterRepository, OwnedVersion
from loraplex.platform.db.session import Database


class CatalogLoader:
    """Called by `Catalog` with (tenant id, adapter name)."""

    def __init__(self, database: Database, *, slot_rank: int) -> None:
        self._database = database
        self._slot_rank = slot_rank

    async def __call__(self, tenant_id: str, name: str) -> CatalogAdapter | None:
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.find_adapter(tenant_id, name)
            if adapter is None:
                return None
            versions = await repository.versions(adapter.id)
            aliases = await repository.aliases(adapter.id)
        if not versions:
            return None
        owned = (OwnedVersion(tenant_id=tenant_id, adapter=name, version=version) for version in versions)
        return CatalogAdapter(
            tenant_id=tenant_id,
            name=name,
            created_at=adapter.created_at,
            versions={entry.version.number: self.catalog_version(entry) for entry in owned},
            aliases={alias.name: alias.targets[0]["version"] for alias in aliases},
        )

    def catalog_version(self, owned: OwnedVersion) -> CatalogVersion:
        version = owned.version
        return CatalogVersion(
            id=version.id,
            tenant_id=owned.tenant_id,
            adapter=owned.adapter,
            number=version.number,
            ref=adapter_ref(version, slot_rank=self._slot_rank),
            base_digest=version.base_digest,
            rank=version.rank,
            pinned=version.pinned,
        )
