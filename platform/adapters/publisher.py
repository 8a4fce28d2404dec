"""From received files to a ready version: inspect, check the values, store, announce."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.digest import version_digest
from loraplex.adapters.errors import AdapterRefusedError
from loraplex.adapters.inspection import AdapterFacts, inspect_adapter
from loraplex.platform.adapters.catalog import Catalog
from loraplex.platform.adapters.facts import stored_facts
from loraplex.platform.adapters.naming import DEFAULT_ALIAS
from loraplex.platform.adapters.received_files import ReceivedFiles
from loraplex.platform.adapters.references import References
from loraplex.platform.adapters.removal import Removals
from loraplex.platform.adapters.repository import READY, RETIRED, UPLOADING, AdapterRepository
from loraplex.platform.adapters.serving_fit import ServingFit
from loraplex.platform.adapters.validator import Validator
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.audit.service import record
from loraplex.platform.db.models import AdapterVersion, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ConflictError
from loraplex.platform.ids import new_id
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.tenants.context import no_such_tenant

logger = logging.getLogger(__name__)


class Publisher:
    """Nothing is written before the files have passed every check: a refusal leaves no row, number or byte."""

    def __init__(
        self,
        *,
        database: Database,
        store: ArtifactStore,
        base: BaseSpec,
        catalog: Catalog,
        references: References,
        removals: Removals,
        fit: ServingFit,
        validator: Validator,
    ) -> None:
        self._database = database
        self._store = store
        self._base = base
        self._catalog = catalog
        self._references = references
        self._removals = removals
        self._fit = fit
        self._validator = validator

    async def publish(
        self, tenant: TenantContext, name: str, folder: Path, received: ReceivedFiles, *, actor: str
    ) -> AdapterVersion:
        """Make the next version of the adapter `name` (made at need) of the files received in `folder`.

        Raises:
            AdapterRefusedError: with every reason that was found.
            StorageError, ServiceUnavailableError: nothing was made; the same upload may pass later.
        """
        facts = await self._inspect(folder)
        version = self._new_version(facts, received, actor=actor)
        self._references.add([version.id])  # a removal of the half-made version waits for this upload
        try:
            await self._announce(tenant, name, version)
            await self._store.put_version(version.digest, folder, received.files)
            await self._make_ready(tenant, name, version)
        except BaseException:
            await self._give_up(version)
            raise
        finally:
            self._references.drop([version.id])
        await self._catalog.refresh(tenant.id, name)
        logger.info(
            "version ready: tenant=%s adapter=%s@%d digest=%s", tenant.name, name, version.number, version.digest
        )
        return version

    async def _inspect(self, folder: Path) -> AdapterFacts:
        info = self._fit.engine_info
        facts = await asyncio.to_thread(
            inspect_adapter,
            folder,
            self._base,
            max_lora_rank=info.max_lora_rank,
            slot_rank=info.slot_rank,
            num_slots=info.num_slots,
        )
        reasons = await self._validator.check(folder)
        if reasons:
            raise AdapterRefusedError(reasons)
        return facts

    def _new_version(self, facts: AdapterFacts, received: ReceivedFiles, *, actor: str) -> AdapterVersion:
        files = received.files
        return AdapterVersion(
            id=new_id("ver"),
            digest=version_digest({name: file.sha256 for name, file in files.items()}),
            base_digest=self._base.digest,
            status=UPLOADING,
            pinned=False,
            num_attention_slots=facts.num_attention_slots,
            num_mlp_slots=facts.num_mlp_slots,
            rank=facts.rank,
            size_bytes=sum(file.size for file in files.values()),
            files={name: {"sha256": file.sha256, "size": file.size} for name, file in sorted(files.items())},
            facts=stored_facts(facts, self._base, also_warn=received.warnings),
            created_at=utc_now(),
            created_by=actor,
        )

    async def _announce(self, tenant: TenantContext, name: str, version: AdapterVersion) -> None:
        """Commit the row that owns the bytes before the first of them is written."""
        async with self._removals.publishing, self._database.session() as session:
            repository = AdapterRepository(session)
            if not await repository.is_active_tenant(tenant.id):
                raise no_such_tenant()
            adapter = await repository.ensure_adapter(tenant.id, name)
            version.adapter_id = adapter.id
            version.number = await repository.next_number(adapter)
            repository.add_version(version)

    async def _make_ready(self, tenant: TenantContext, name: str, version: AdapterVersion) -> None:
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.find_adapter(tenant.id, name, for_update=True)
            if adapter is None or not await repository.make_ready(version.id):
                raise ConflictError(f"the adapter {name} was deleted during the upload; send it again", param="adapter")
            if await repository.find_alias(adapter.id, DEFAULT_ALIAS) is None:
                repository.add_alias(adapter.id, DEFAULT_ALIAS, version.number)
            label = f"{name}@{version.number}"
            detail = {"digest": version.digest, "size_bytes": version.size_bytes}
            record(
                session,
                actor=version.created_by,
                action="adapter.version.create",
                target=label,
                tenant=tenant.name,
                detail=detail,
            )
        version.status = READY

    async def _give_up(self, version: AdapterVersion) -> None:
        async with self._database.session() as session:
            await AdapterRepository(session).set_status([version.id], RETIRED)
        self._removals.begin([version.id])
