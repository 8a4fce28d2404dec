"""The registry's SQL: adapters, versions and aliases. Every function runs in the session that its caller commits."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, String, cast, delete, exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.adapters.naming import is_alias_name, is_name, unknown_adapter
from loraplex.platform.db.models import Adapter, AdapterAlias, AdapterVersion, Tenant, utc_now
from loraplex.platform.ids import new_id
from loraplex.platform.tenants.context import ACTIVE

READY = "ready"
UPLOADING = "uploading"  # its files are on their way to the store; never served, removed when found at start
RETIRED = "retired"  # deleted; its files go when the last request has left it


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedVersion:
    """A version with the names that lead to it."""

    tenant_id: str
    adapter: str
    version: AdapterVersion


class AdapterRepository:
    def __init__(self, session: AsyncSession) -> None:
        self._session = session

    async def find_adapter(self, tenant_id: str, name: str, *, for_update: bool = False) -> Adapter | None:
        """`for_update`: nobody else changes the adapter before this transaction ends."""
        if not is_name(name):  # nor would PostgreSQL take every string, such as one with a NUL
            return None
        query = _adapters(tenant_id).where(Adapter.name == name)
        return await self._session.scalar(query.with_for_update() if for_update else query)

    async def existing_adapter(self, tenant_id: str, name: str, *, for_update: bool = False) -> Adapter:
        """Raises NotFoundError."""
        adapter = await self.find_adapter(tenant_id, name, for_update=for_update)
        if adapter is None:
            raise unknown_adapter(name, param="adapter")
        return adapter

    async def all_adapters(self, tenant_id: str) -> Sequence[Adapter]:
        """Also those whose first version is being uploaded."""
        return (await self._session.scalars(_adapters(tenant_id).with_for_update())).all()

    async def list_adapters(self, tenant_id: str, *, after: str, limit: int) -> Sequence[Adapter]:
        """Those with a ready version, in the order of their names, beginning behind `after`."""
        is_ready = exists().where(AdapterVersion.adapter_id == Adapter.id, AdapterVersion.status == READY)
        query = _adapters(tenant_id).where(Adapter.name > after, is_ready).order_by(Adapter.name).limit(limit)
        return (await self._session.scalars(query)).all()

    async def ensure_adapter(self, tenant_id: str, name: str) -> Adapter:
        """The tenant's adapter of that name, made or made again at need; its version numbers go on."""
        query = select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.name == name).with_for_update()
        adapter = await self._session.scalar(query)
        if adapter is None:
            adapter = await self._insert_adapter(tenant_id, name) or (await self._session.scalars(query)).one()
        if adapter.deleted_at is not None:
            adapter.deleted_at, adapter.created_at = None, utc_now()
        return adapter

    async def next_number(self, adapter: Adapter) -> int:
        """A version number that this adapter never had."""
        query = (
            update(Adapter)
            .where(Adapter.id == adapter.id)
            .values(last_version=Adapter.last_version + 1)
            .returning(Adapter.last_version)
        )
        return (await self._session.execute(query)).scalar_one()

    async def retire_adapter(self, adapter: Adapter) -> list[str]:
        """Delete the name with all aliases, and retire all versions, also one that is being uploaded: their ids."""
        adapter.deleted_at = utc_now()
        await self.delete_aliases(adapter.id)
        owned = await self.owned_versions(AdapterVersion.adapter_id == adapter.id)
        version_ids = [entry.version.id for entry in owned]
        await self.set_status(version_ids, RETIRED)
        return version_ids

    def add_version(self, version: AdapterVersion) -> None:
        self._session.add(version)

    async def make_ready(self, version_id: str) -> bool:
        """False when the version was retired during its upload."""
        query = update(AdapterVersion).where(AdapterVersion.id == version_id, AdapterVersion.status == UPLOADING)
        found = await self._session.scalar(query.values(status=READY).returning(AdapterVersion.id))
        return found is not None

    async def versions(
        self, adapter_id: str, *, before: int | None = None, limit: int | None = None
    ) -> Sequence[AdapterVersion]:
        """Ready versions, newest first, beginning below number `before`."""
        query = _ready_versions().where(AdapterVersion.adapter_id == adapter_id)
        if before is not None:
            query = query.where(AdapterVersion.number < before)
        return (await self._session.scalars(query.order_by(AdapterVersion.number.desc()).limit(limit))).all()

    async def all_versions(self, adapter_ids: Sequence[str]) -> Sequence[AdapterVersion]:
        """Ready versions of several adapters."""
        return (await self._session.scalars(_ready_versions().where(AdapterVersion.adapter_id.in_(adapter_ids)))).all()

    async def find_version(self, adapter_id: str, number: int) -> AdapterVersion | None:
        return await self._session.scalar(
            _ready_versions().where(AdapterVersion.adapter_id == adapter_id, AdapterVersion.number == number)
        )

    async def existing_version(self, adapter: Adapter, number: int) -> AdapterVersion:
        """Raises NotFoundError."""
        version = await self.find_version(adapter.id, number)
        if version is None:
            raise unknown_adapter(f"{adapter.name}@{number}", param="version")
        return version

    async def version_by_id(self, version_id: str) -> AdapterVersion | None:
        return await self._session.get(AdapterVersion, version_id)

    async def set_status(self, version_ids: Iterable[str], status: str) -> None:
        await self._session.execute(
            update(AdapterVersion).where(AdapterVersion.id.in_(list(version_ids))).values(status=status)
        )

    async def set_pinned(self, version_id: str, *, pinned: bool) -> None:
        await self._session.execute(update(AdapterVersion).where(AdapterVersion.id == version_id).values(pinned=pinned))

    async def delete_version(self, version_id: str) -> None:
        await self._session.execute(delete(AdapterVersion).where(AdapterVersion.id == version_id))

    async def close_empty_adapter(self, adapter_id: str) -> None:
        """An adapter without any version is none; its row keeps the version numbers."""
        if await self._exists(AdapterVersion.adapter_id == adapter_id):
            return
        await self.delete_aliases(adapter_id)
        await self._session.execute(
            update(Adapter).where(Adapter.id == adapter_id, Adapter.deleted_at.is_(None)).values(deleted_at=utc_now())
        )

    async def aliases(self, *adapter_ids: str) -> Sequence[AdapterAlias]:
        query = select(AdapterAlias).where(AdapterAlias.adapter_id.in_(adapter_ids)).order_by(AdapterAlias.name)
        return (await self._session.scalars(query)).all()

    async def find_alias(self, adapter_id: str, name: str) -> AdapterAlias | None:
        if not is_alias_name(name):
            return None
        return await self._session.scalar(
            select(AdapterAlias).where(AdapterAlias.adapter_id == adapter_id, AdapterAlias.name == name)
        )

    def add_alias(self, adapter_id: str, name: str, version: int) -> AdapterAlias:
        alias = AdapterAlias(id=new_id("als"), adapter_id=adapter_id, name=name)
        point_alias(alias, version)
        self._session.add(alias)
        return alias

    async def delete_alias(self, alias: AdapterAlias) -> None:
        await self._session.delete(alias)

    async def delete_aliases(self, adapter_id: str) -> None:
        await self._session.execute(delete(AdapterAlias).where(AdapterAlias.adapter_id == adapter_id))

    async def owned_versions(self, *conditions: ColumnElement[bool]) -> list[OwnedVersion]:
        """Versions of any tenant that meet the conditions, oldest first."""
        query = select(AdapterVersion, Adapter).join(Adapter, AdapterVersion.adapter_id == Adapter.id)
        rows = await self._session.execute(query.where(*conditions).order_by(AdapterVersion.created_at))
        return [
            OwnedVersion(tenant_id=adapter.tenant_id, adapter=adapter.name, version=version)
            for version, adapter in rows
        ]

    async def has_other_owner(self, version: AdapterVersion, *conditions: ColumnElement[bool]) -> bool:
        """Whether another version, of whatever tenant, has the same bytes and meets the conditions."""
        return await self._exists(AdapterVersion.digest == version.digest, AdapterVersion.id != version.id, *conditions)

    async def unshared_blobs(self, version: AdapterVersion) -> list[str]:
        """sha256 of those files of the version that no other version has."""
        digests = sorted({str(entry["sha256"]) for entry in version.files.values()})
        return [
            digest
            for digest in digests
            if not await self._exists(
                AdapterVersion.id != version.id, cast(AdapterVersion.files, String).contains(digest, autoescape=True)
            )
        ]

    async def tenants_with_adapter(self, name: str) -> list[str]:
        """Names of the tenants that have an adapter of that name."""
        query = select(Tenant.name).join(Adapter, Adapter.tenant_id == Tenant.id)
        return list(await self._session.scalars(query.where(Adapter.name == name, Adapter.deleted_at.is_(None))))

    async def is_active_tenant(self, tenant_id: str) -> bool:
        query = select(Tenant.id).where(Tenant.id == tenant_id, Tenant.status == ACTIVE)
        return await self._session.scalar(query.with_for_update(read=True)) is not None

    async def _exists(self, *conditions: ColumnElement[bool]) -> bool:
        return await self._session.scalar(select(AdapterVersion.id).where(*conditions).limit(1)) is not None

    async def _insert_adapter(self, tenant_id: str, name: str) -> Adapter | None:
        adapter = Adapter(id=new_id("adp"), tenant_id=tenant_id, name=name, last_version=0)
        try:
            async with self._session.begin_nested():
                self._session.add(adapter)
        except IntegrityError:  # another process made it at the same moment
            return None
        return adapter


def point_alias(alias: AdapterAlias, version: int) -> None:
    """Give the alias one target, and an etag that it never had."""
    alias.targets = [{"version": version, "weight": 100}]
    alias.etag, alias.updated_at = secrets.token_hex(8), utc_now()


def _adapters(tenant_id: str) -> Select[Adapter]:
    return select(Adapter).where(Adapter.tenant_id == tenant_id, Adapter.deleted_at.is_(None))


def _ready_versions() -> Select[AdapterVersion]:
    return select(AdapterVersion).where(AdapterVersion.status == READY)
