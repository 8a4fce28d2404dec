"""The registry as the rest of the platform sees it: what a name means now, and who still runs through what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import LoraSelection, SelectionPart
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.protocol import EngineClient
from loraplex.platform.adapters.aliases import Aliases
from loraplex.platform.adapters.catalog import Catalog, CatalogAdapter, CatalogVersion
from loraplex.platform.adapters.catalog_loader import CatalogLoader
from loraplex.platform.adapters.naming import check_new_name, is_name, label, shown, unknown_adapter
from loraplex.platform.adapters.publisher import Publisher
from loraplex.platform.adapters.references import References
from loraplex.platform.adapters.removal import Removals
from loraplex.platform.adapters.repository import AdapterRepository
from loraplex.platform.adapters.residency import Residency
from loraplex.platform.adapters.resolution import (
    RequestedAdapter,
    ResolvedAdapter,
    ResolvedSelection,
    check_number_of_parts,
)
from loraplex.platform.adapters.retirement import Retirement
from loraplex.platform.adapters.serving_fit import ServingFit
from loraplex.platform.adapters.upload_space import UploadSpace
from loraplex.platform.adapters.validator import Validator
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.db.models import AdapterVersion
from loraplex.platform.db.session import Database
from loraplex.platform.keyed_lock import KeyedLock
from loraplex.platform.storage.artifact_store import ArtifactStore

MAX_ABS_WEIGHT = 10.0
LIST_PAGE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedAdapter:
    """An adapter as `/v1/models` shows it, with the version that its bare name means."""

    name: str
    version: int
    digest: str
    created_at: datetime


class AdapterRegistry:
    """Resolves names from memory, keeps what accepted requests run through, and joins those who change the registry.

    `publisher`, `aliases`, `retirement` and `residency` do the work of the management API. Order of life: `start`
    before the first request, `repin` whenever an engine has become ready, `aclose` at the end.
    """

    def __init__(
        self,
        *,
        database: Database,
        store: ArtifactStore,
        engine: EngineClient,
        base: BaseSpec,
        served_model_name: str,
        slot_rank: int,
        uploads_dir: Path,
        max_upload_bytes: int,
    ) -> None:
        self._database = database
        self._store = store
        self._served_model_name = served_model_name
        self._references = References()
        self._validator = Validator()
        self._fit = ServingFit(base, engine)
        self._loader = CatalogLoader(database, slot_rank=slot_rank)
        self._catalog = Catalog(self._loader.load)
        residency_lock = KeyedLock()
        self._removals = Removals(
            database=database,
            store=store,
            engine=engine,
            references=self._references,
            residency_lock=residency_lock,
        )
        self.uploads = UploadSpace(uploads_dir, max_upload_bytes=max_upload_bytes)
        self.aliases = Aliases(database=database, catalog=self._catalog)
        self.retirement = Retirement(database=database, catalog=self._catalog, removals=self._removals)
        self.residency = Residency(
            database=database,
            engine=engine,
            catalog=self._catalog,
            loader=self._loader,
            fit=self._fit,
            lock=residency_lock,
        )
        self.publisher = Publisher(
            database=database,
            store=store,
            base=base,
            catalog=self._catalog,
            references=self._references,
            removals=self._removals,
            fit=self._fit,
            validator=self._validator,
        )

    async def start(self) -> None:
        """Check names, remove what a killed process left behind, and go on with its removals.

        Raises ConfigurationError when an adapter has the name that the base is served under.
        """
        await self._check_served_name()
        self.uploads.open()
        self._store.clean_temporary_files()
        await self._removals.resume()

    async def repin(self) -> None:
        """Tell an engine that has just become ready every stored pin."""
        await self.residency.repin()

    async def aclose(self) -> None:
        await self._removals.aclose()
        await self._validator.aclose()
        self.uploads.close()

    async def resolve(self, tenant: TenantContext, requested: Sequence[RequestedAdapter]) -> ResolvedSelection:
        """The versions that answer now, as one selection; nothing requested = the base.

        Raises:
            NotFoundError: a name, version or alias that the tenant does not have, whoever else has it.
            InvalidRequestError: too many parts, a weight out of bounds, or one version twice.
            ConflictError: a version of another base, or one that no longer fits this server.
        """
        check_number_of_parts(len(requested))
        for one in requested:
            _check_weight(one)
        versions = [await self._find(tenant, one) for one in requested]
        _check_no_repeats(versions)
        for version in versions:
            self._fit.check(version)
        parts = [(version, one.weight) for version, one in zip(versions, requested, strict=True)]
        return ResolvedSelection(
            selection=LoraSelection.of(SelectionPart(version.ref, weight) for version, weight in parts),
            adapters=tuple(_resolved(version, weight) for version, weight in parts),
        )

    @asynccontextmanager
    async def hold(self, resolved: ResolvedSelection) -> AsyncIterator[None]:
        """Keep the versions' files and weights for the life of one accepted request.

        Raises NotFoundError when one was deleted since it was resolved.
        """
        for adapter in resolved.adapters:
            if not self._catalog.is_live(adapter.version_id):
                raise unknown_adapter(adapter.label)
        version_ids = [adapter.version_id for adapter in resolved.adapters]
        self._references.add(version_ids)
        try:
            yield
        finally:
            self._references.drop(version_ids)

    async def list_for_tenant(
        self, tenant: TenantContext, *, after: str = "", limit: int = LIST_PAGE
    ) -> list[ListedAdapter]:
        """Adapters in the order of their names, beginning behind `after`, each with its default version."""
        return [_listed(adapter) for adapter in await self._loader.load_page(tenant.id, after=after, limit=limit)]

    async def list_adapters(
        self, tenant: TenantContext, *, after: str = "", limit: int = LIST_PAGE
    ) -> list[CatalogAdapter]:
        """Adapters in the order of their names, beginning behind `after`."""
        if after and not is_name(after):
            raise InvalidRequestError(f"{shown(after)} is no adapter's name", param="after")
        return await self._loader.load_page(tenant.id, after=after, limit=limit)

    async def get_adapter(self, tenant: TenantContext, name: str) -> CatalogAdapter:
        """Raises NotFoundError."""
        adapter = await self._catalog.get(tenant.id, name) if is_name(name) else None
        if adapter is None:
            raise unknown_adapter(name, param="adapter")
        return adapter

    async def list_versions(
        self, tenant: TenantContext, name: str, *, before: int | None, limit: int
    ) -> Sequence[AdapterVersion]:
        """Ready versions, newest first, beginning below number `before`. Raises NotFoundError."""
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, name)
            return await repository.versions(adapter.id, before=before, limit=limit)

    async def get_version(self, tenant: TenantContext, name: str, number: int) -> AdapterVersion:
        """Raises NotFoundError."""
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            return await repository.existing_version(await repository.existing_adapter(tenant.id, name), number)

    async def remove_tenant(self, tenant_id: str) -> None:
        """Delete all adapters of a tenant; return when requests have drained, and slots, files and rows are gone."""
        await self.retirement.delete_tenant(tenant_id)

    def check_upload(self, name: str) -> None:
        """Settle what can be settled before the body is read.

        Raises InvalidRequestError unless an adapter may be called so, ServiceUnavailableError while the engine starts,
        which knows how much fits.
        """
        self._fit.check_started()
        check_new_name(name, what="adapter")
        if name == self._served_model_name:
            raise InvalidRequestError(f"{name} is the name of the base model; choose another", param="name")

    async def wait_removed(self) -> None:
        """Return when every removal that has begun is done."""
        await self._removals.wait()

    async def _find(self, tenant: TenantContext, requested: RequestedAdapter) -> CatalogVersion:
        # What is another tenant's takes the same way as what is nowhere; what nobody can have never reaches SQL.
        adapter = await self._catalog.get(tenant.id, requested.name) if is_name(requested.name) else None
        version = None if adapter is None else adapter.pick(requested)
        if version is None:
            raise unknown_adapter(label(requested))
        return version

    async def _check_served_name(self) -> None:
        async with self._database.read_session() as session:
            tenants = await AdapterRepository(session).tenants_with_adapter(self._served_model_name)
        if tenants:
            raise ConfigurationError(
                f"the base cannot be served as {self._served_model_name}: so is an adapter of tenant "
                f"{', '.join(tenants[:3])}; start with another --served-model-name",
                param="served_model_name",
            )


def _listed(adapter: CatalogAdapter) -> ListedAdapter:
    version = adapter.pick(RequestedAdapter(name=adapter.name))
    assert version is not None, "an adapter with a version has a default"
    return ListedAdapter(
        name=adapter.name, version=version.number, digest=version.ref.digest, created_at=adapter.created_at
    )


def _check_weight(requested: RequestedAdapter) -> None:
    if not abs(requested.weight) <= MAX_ABS_WEIGHT:  # NaN compares false
        raise InvalidRequestError(
            f"the weight of {requested.name} is {requested.weight}; it must be finite and between "
            f"-{MAX_ABS_WEIGHT:g} and {MAX_ABS_WEIGHT:g}",
            param="lora",
        )


def _check_no_repeats(versions: Sequence[CatalogVersion]) -> None:
    seen: set[str] = set()
    for version in versions:
        if version.id in seen:
            raise InvalidRequestError(
                f"the mix has {version.label} twice; name it once, with the sum of the weights", param="lora"
            )
        seen.add(version.id)


def _resolved(version: CatalogVersion, weight: float) -> ResolvedAdapter:
    return ResolvedAdapter(
        name=version.adapter, version=version.number, digest=version.ref.digest, weight=weight, version_id=version.id
    )
