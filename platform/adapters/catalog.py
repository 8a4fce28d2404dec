"""What is registered, as requests see it: from memory, with SQL only on a miss and after a change."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from loraplex.adapters.ref import AdapterRef
from loraplex.platform.adapters.naming import DEFAULT_ALIAS, LATEST_ALIAS
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.keyed_lock import KeyedLock


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogVersion:
    """A ready version. Immutable but for `pinned`, whose change makes a new value."""

    id: str
    tenant_id: str
    adapter: str  # name
    number: int
    ref: AdapterRef
    base_digest: str
    rank: int  # the highest of its modules
    pinned: bool

    @property
    def label(self) -> str:
        return f"{self.adapter}@{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogAdapter:
    """A name of a tenant with its ready versions; `aliases` maps to version numbers."""

    tenant_id: str
    name: str
    created_at: datetime
    versions: Mapping[int, CatalogVersion]
    aliases: Mapping[str, int]

    def pick(self, requested: RequestedAdapter) -> CatalogVersion | None:
        """The version that answers, or None when the number or alias does not exist."""
        if requested.version is not None:
            return self.versions.get(requested.version)
        alias = requested.alias or DEFAULT_ALIAS
        if alias == LATEST_ALIAS:
            return self.versions[max(self.versions)] if self.versions else None
        number = self.aliases.get(alias)
        return None if number is None else self.versions.get(number)


AdapterLoader = Callable[[str, str], Awaitable[CatalogAdapter | None]]  # (tenant id, name) -> what SQL says


class Catalog:
    """(tenant id, adapter name) -> CatalogAdapter.

    Every read of SQL and the swap that follows it happen under the name's lock, so an older reading never replaces a
    newer one. A name that does not exist is not remembered: memory is bounded by what is registered.
    """

    def __init__(self, load: AdapterLoader) -> None:
        self._load = load
        self._adapters: dict[tuple[str, str], CatalogAdapter] = {}
        self._live: set[str] = set()  # ids of the versions in `_adapters`
        self._locks = KeyedLock()

    async def get(self, tenant_id: str, name: str) -> CatalogAdapter | None:
        found = self._adapters.get((tenant_id, name))
        if found is not None:
            return found
        async with self._locks.hold(f"{tenant_id}/{name}"):
            return self._adapters.get((tenant_id, name)) or await self._reload(tenant_id, name)

    async def refresh(self, tenant_id: str, name: str) -> CatalogAdapter | None:
        """Read the adapter again after a committed change; requests see the change from here on."""
        async with self._locks.hold(f"{tenant_id}/{name}"):
            return await self._reload(tenant_id, name)

    def names(self, tenant_id: str) -> list[str]:
        """Adapters of the tenant that are in memory."""
        return [name for owner, name in self._adapters if owner == tenant_id]

    def is_live(self, version_id: str) -> bool:
        """False once the version was deleted, also while requests that began before still run."""
        return version_id in self._live

    async def _reload(self, tenant_id: str, name: str) -> CatalogAdapter | None:
        loaded = await self._load(tenant_id, name)
        replaced = self._adapters.pop((tenant_id, name), None)
        if replaced is not None:
            self._live.difference_update(version.id for version in replaced.versions.values())
        if loaded is not None:
            self._adapters[tenant_id, name] = loaded
            self._live.update(version.id for version in loaded.versions.values())
        return loaded
