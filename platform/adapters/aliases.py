"""Names that point to a version. The only way to move a bare name's traffic."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.catalog import Catalog
from loraplex.platform.adapters.naming import RESERVED_ALIASES, check_new_alias, shown
from loraplex.platform.adapters.repository import AdapterRepository, point_alias
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.audit.service import record
from loraplex.platform.db.models import AdapterAlias
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ConflictError, NotFoundError


class EtagMismatchError(ConflictError):
    """The alias was changed since the caller looked at it."""

    code = "etag_mismatch"


class Aliases:
    def __init__(self, *, database: Database, catalog: Catalog) -> None:
        self._database = database
        self._catalog = catalog

    async def list(self, tenant: TenantContext, adapter_name: str) -> Sequence[AdapterAlias]:
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, adapter_name)
            return await repository.aliases(adapter.id)

    async def get(self, tenant: TenantContext, adapter_name: str, name: str) -> AdapterAlias:
        async with self._database.read_session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, adapter_name)
            return _existing(await repository.find_alias(adapter.id, name), name)

    async def put(
        self, tenant: TenantContext, adapter_name: str, name: str, *, version: int, if_match: str | None, actor: str
    ) -> AdapterAlias:
        """Point the alias to a ready version; new requests go there when this returns.

        `if_match` None sets it whatever it is; else only if its etag is this one (`*`: if it exists).
        Raises NotFoundError for an adapter or version that does not exist, EtagMismatchError.
        """
        check_new_alias(name)
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, adapter_name, for_update=True)
            await repository.existing_version(adapter, version)
            alias = await repository.find_alias(adapter.id, name)
            _check_etag(alias, if_match)
            if alias is None:
                alias = repository.add_alias(adapter.id, name, version)
            else:
                point_alias(alias, version)
            record(
                session,
                actor=actor,
                action="adapter.alias.put",
                target=f"{adapter_name}@{name}",
                tenant=tenant.name,
                detail={"version": version},
            )
        await self._catalog.refresh(tenant.id, adapter_name)
        return alias

    async def delete(
        self, tenant: TenantContext, adapter_name: str, name: str, *, if_match: str | None, actor: str
    ) -> None:
        if name in RESERVED_ALIASES:
            raise InvalidRequestError(f"the alias {name} cannot be deleted; delete the adapter", param="alias")
        async with self._database.session() as session:
            repository = AdapterRepository(session)
            adapter = await repository.existing_adapter(tenant.id, adapter_name, for_update=True)
            alias = _existing(await repository.find_alias(adapter.id, name), name)
            _check_etag(alias, if_match)
            await repository.delete_alias(alias)
            record(
                session,
                actor=actor,
                action="adapter.alias.delete",
                target=f"{adapter_name}@{name}",
                tenant=tenant.name,
            )
        await self._catalog.refresh(tenant.id, adapter_name)


def _existing(alias: AdapterAlias | None, name: str) -> AdapterAlias:
    if alias is None:
        raise NotFoundError(f"the alias {shown(name)} does not exist", param="alias")
    return alias


def _check_etag(alias: AdapterAlias | None, if_match: str | None) -> None:
    if if_match is None or (alias is not None and if_match in ("*", alias.etag)):
        return
    now = "does not exist" if alias is None else f'has the etag "{alias.etag}" and targets {alias.targets}'
    raise EtagMismatchError(f"If-Match is {shown(if_match)}, but the alias {now}; look again", param="if-match")
