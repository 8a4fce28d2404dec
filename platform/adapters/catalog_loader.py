"""Reads adapters from SQL as requests see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from loraplex.platform.adapters.catalog import CatalogAdapter, CatalogVersion
from loraplex.platform.adapters.facts import adapter_ref
from loraplex.platform.adapters.repository import AdapterRepository, OwnedVersion
from loraplex.platform.db.models import Adapter
from loraplex.platform.db.session import Database


class CatalogLoader:
    def __init__(self, database: Database, *, slot_rank: int) -> None:
        self._database = database
        self._slot_rank = slot_rank

    async def load(self, tenant_id: str, name: str) -> CatalogAdapter | None:
        """None for a name without a ready version."""
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.find_adapter(tenant_id, name)
            loaded = [] if adapter is None else await self._load(repository, [adapter])
        return loaded[0] if loaded else None

    async def load_page(self, tenant_id: str, *, after: str, limit: int) -> list[CatalogAdapter]:
        """In the order of their names, beginning behind `after`; as many queries however long the page is."""
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            return await self._load(repository, await repository.list_adapters(tenant_id, after=after, limit=limit))

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

    async def _load(self, repository: AdapterRepository, adapters: Sequence[Adapter]) -> list[CatalogAdapter]:
        by_id = {adapter.id: adapter for adapter in adapters}
        versions: dict[str, dict[int, CatalogVersion]] = defaultdict(dict)
        for version in await repository.all_versions(list(by_id)):
            adapter = by_id[version.adapter_id]
            owned = OwnedVersion(tenant_id=adapter.tenant_id, adapter=adapter.name, version=version)
            versions[adapter.id][version.number] = self.catalog_version(owned)
        aliases: dict[str, dict[str, int]] = defaultdict(dict)
        for alias in await repository.aliases(*by_id):
            aliases[alias.adapter_id][alias.name] = alias.targets[0]["version"]
        return [
            CatalogAdapter(
                tenant_id=adapter.tenant_id,
                name=adapter.name,
                created_at=adapter.created_at,
                versions=versions[adapter.id],
                aliases=aliases[adapter.id],
            )
            for adapter in adapters
            if adapter.id in versions
        ]
