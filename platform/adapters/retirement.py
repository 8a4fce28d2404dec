"""Deleting: gone for new requests when the call returns, removed when the last accepted one has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loraplex.platform.adapters.catalog import Catalog
from loraplex.platform.adapters.removal import Removals
from loraplex.platform.adapters.repository import RETIRED, AdapterRepository
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.audit.service import record
from loraplex.platform.db.models import Adapter, AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ConflictError


class Retirement:
    def __init__(self, *, database: Database, catalog: Catalog, removals: Removals) -> None:
        self._database = database
        self._catalog = catalog
        self._removals = removals

    async def delete_version(self, tenant: TenantContext, name: str, number: int, *, actor: str) -> None:
        """Raises NotFoundError, or ConflictError naming the aliases that target the version."""
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, name, for_update=True)
            version = await repository.existing_version(adapter, number)
            aliases = [alias.name for alias in await repository.aliases(adapter.id) if _targets(alias.targets, number)]
            if aliases:
                raise ConflictError(
                    f"{name}@{number} is the target of the alias {', '.join(aliases)}; move it to another version "
                    "first, or delete the adapter",
                    param="version",
                )
            await repository.set_status([version.id], RETIRED)
            record(
                session,
                actor=actor,
                action="adapter.version.delete",
                target=f"{name}@{number}",
                tenant=tenant.name,
                detail={"digest": version.digest},
            )
        await self._catalog.refresh(tenant.id, name)
        self._removals.begin([version.id])

    async def delete_adapter(self, tenant: TenantContext, name: str, *, actor: str) -> None:
        """With all versions and aliases; a later upload under the name goes on with the version numbers."""
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, name, for_update=True)
            version_ids = await repository.retire_adapter(adapter)
            record(session, actor=actor, action="adapter.delete", target=name, tenant=tenant.name)
        await self._catalog.refresh(tenant.id, name)
        self._removals.begin(version_ids)

    async def delete_tenant(self, tenant_id: str) -> None:
        """Return when requests have drained and files, slots and rows of all the tenant's versions are gone.

        Harmless when repeated. Raises StorageError when the store cannot be reached; the versions stay retired.
        """
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            for adapter in await repository.all_adapters(tenant_id):
                await repository.retire_adapter(adapter)
            retired = await repository.owned_versions(Adapter.tenant_id == tenant_id, AdapterVersion.status == RETIRED)
        for name in self._catalog.names(tenant_id):
            await self._catalog.refresh(tenant_id, name)
        removals = self._removals.begin(owned.version.id for owned in retired)
        if removals:
            await asyncio.wait(removals)  # unlike awaiting each, leaves them running when this call is cancelled
        for removal in removals:
            removal.result()


def _targets(targets: Sequence[dict[str, int]], number: int) -> bool:
    return any(target["version"] == number for target in targets)
