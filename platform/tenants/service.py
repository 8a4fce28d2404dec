"""Makes, finds and removes tenants."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from sqlalchemy import or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.adapters.errors import InvalidRequestError, ServerError
from loraplex.platform.adapters.naming import check_new_name, is_name
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.audit.service import HOST, record
from loraplex.platform.db.models import Tenant
from loraplex.platform.db.session import Database
from loraplex.platform.errors import ConflictError
from loraplex.platform.ids import is_id, new_id
from loraplex.platform.keyed_lock import KeyedLock
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.tenants.context import ACTIVE, DELETING, TenantContexts, no_such_tenant
from loraplex.platform.tenants.in_flight import RequestsInFlight

CONTEXT_LIFETIME_S = 2.0  # how long a change by another process may go unnoticed
CONTEXT_CAPACITY = 4096
FINISH_INTERVAL_S = 15.0

RemoveFiles = Callable[[str], Awaitable[None]]
"""Given a tenant's id: waits for its requests in the engine, then removes its adapters and their files."""

logger = logging.getLogger(__name__)


class TenantService:
    """The truth about tenants. A deleted tenant's name is free again; its id never comes back."""

    def __init__(self, database: Database, secret_key: SecretKey, api_keys: ApiKeyService) -> None:
        self._database = database
        self._api_keys = api_keys
        self._contexts = TenantContexts(secret_key)
        self._cache: dict[str, tuple[TenantContext, float]] = {}  # by name and by id, with monotonic seconds
        self._num_forgotten = 0
        self._looking_up = KeyedLock()
        self._removals: dict[str, asyncio.Task[None]] = {}  # by id
        self.in_flight = RequestsInFlight()

    async def create(self, name: str, *, actor: str) -> Tenant:
        """Raises InvalidRequestError for a bad name, ConflictError for one that is taken."""
        check_new_name(name, what="tenant")
        if is_id(name):
            raise InvalidRequestError(f"{name} looks like a tenant's id; choose another name", param="name")
        tenant = Tenant(id=new_id("ten"), name=name, cache_salt=secrets.token_bytes(32), status=ACTIVE)
        try:
            async with self._database.session() as session:
                session.add(tenant)
                record(session, actor=actor, action="tenant.create", target=tenant.id, tenant=name)
        except IntegrityError as error:
            raise ConflictError(f"there is a tenant {name!r} already", param="name") from error
        return tenant

    async def get(self, name_or_id: str) -> Tenant:
        """A tenant in any state. Raises NotFoundError."""
        async with self._database.read_session() as session:
            return await _find(session, name_or_id)

    async def list(self, *, after: str | None, limit: int) -> Sequence[Tenant]:
        """Tenants in the order of their names."""
        query = select(Tenant).order_by(Tenant.name).limit(limit)
        if after is not None:
            query = query.where(Tenant.name > after)
        async with self._database.read_session() as session:
            return (await session.scalars(query)).all()

    async def context(self, name_or_id: str) -> TenantContext:
        """What requests run in. Raises NotFoundError for a tenant that is unknown or being deleted."""
        cached = self._cached(name_or_id)
        if cached is not None:
            return cached
        async with self._looking_up.hold(name_or_id):  # of many requests in one tenant, one asks the database
            return self._cached(name_or_id) or await self._look_up(name_or_id)

    async def mark_deleting(self, name_or_id: str, *, confirm: str | None, actor: str) -> Tenant:
        """From now on the tenant takes no new request. Raises NotFoundError, InvalidRequestError, ConflictError."""
        async with self._database.session() as session:
            tenant = await _find(session, name_or_id)
            _check_confirmed(tenant.name, confirm)
            if tenant.status == ACTIVE:
                tenant.status = DELETING
                record(session, actor=actor, action="tenant.delete", target=tenant.id, tenant=tenant.name)
        self._forget(tenant)
        return tenant

    async def delete(self, name_or_id: str, *, confirm: str | None, actor: str, remove_files: RemoveFiles) -> None:
        """Take no new request, let accepted ones finish, then remove keys, adapters and files. Usage and audit stay.

        The removal goes on if the caller goes away; if the server stops, `finish_deletions` takes it up again.
        """
        tenant = await self.mark_deleting(name_or_id, confirm=confirm, actor=actor)
        await asyncio.shield(self._removal(tenant, remove_files))

    @asynccontextmanager
    async def finishing_deletions(self, remove_files: RemoveFiles) -> AsyncIterator[None]:
        """While this is open, marked tenants are removed: left from before, or marked by the host's commands."""
        task = asyncio.create_task(self._finish_for_ever(remove_files), name="finish-deletions")
        try:
            yield
        finally:
            cancelled = [task, *self._removals.values()]
            for one in cancelled:
                one.cancel()
            await asyncio.gather(*cancelled, return_exceptions=True)

    async def _finish_for_ever(self, remove_files: RemoveFiles) -> None:
        while True:
            try:
                await self.finish_deletions(remove_files)
            except ServerError as error:
                logger.error("cannot look for tenants to remove: %s", error.message)
            await asyncio.sleep(FINISH_INTERVAL_S)

    async def finish_deletions(self, remove_files: RemoveFiles) -> None:
        """Remove the tenants that are marked: by the host's commands, or before the server was stopped."""
        async with self._database.read_session() as session:
            marked = (await session.scalars(select(Tenant).where(Tenant.status == DELETING))).all()
        removals = [self._removal(tenant, remove_files) for tenant in marked]
        for tenant, outcome in zip(marked, await asyncio.gather(*removals, return_exceptions=True), strict=True):
            if isinstance(outcome, Exception):
                logger.error("tenant %s could not be removed; it will be tried again: %s", tenant.name, outcome)

    def _cached(self, name_or_id: str) -> TenantContext | None:
        context, stale_at = self._cache.get(name_or_id, (None, 0.0))
        return context if stale_at > time.monotonic() else None

    async def _look_up(self, name_or_id: str) -> TenantContext:
        num_forgotten = self._num_forgotten
        context = self._contexts.of(await self.get(name_or_id))
        if num_forgotten != self._num_forgotten:
            return context  # may have been read just before its tenant was deleted: not remembered
        if len(self._cache) >= CONTEXT_CAPACITY:
            self._cache.clear()
        self._cache[name_or_id] = (context, time.monotonic() + CONTEXT_LIFETIME_S)
        return context

    def _removal(self, tenant: Tenant, remove_files: RemoveFiles) -> asyncio.Task[None]:
        """One task for each tenant, however many ask."""
        task = self._removals.get(tenant.id)
        if task is None:
            task = asyncio.create_task(self._remove(tenant, remove_files))
            self._removals[tenant.id] = task
            task.add_done_callback(lambda _: self._removals.pop(tenant.id))
        return task

    async def _remove(self, tenant: Tenant, remove_files: RemoveFiles) -> None:
        self._forget(tenant)
        await self.in_flight.drain(tenant.id)
        await remove_files(tenant.id)
        async with self._database.session() as session:
            row = await session.get(Tenant, tenant.id)
            if row is not None:  # its keys and adapters go with it
                await session.delete(row)
                record(session, actor=HOST, action="tenant.removed", target=tenant.id, tenant=tenant.name)
        self._forget(tenant)

    def _forget(self, tenant: Tenant) -> None:
        self._num_forgotten += 1
        self._cache.pop(tenant.name, None)
        self._cache.pop(tenant.id, None)
        self._api_keys.forget_tenant(tenant.id)


async def _find(session: AsyncSession, name_or_id: str) -> Tenant:
    if not (is_name(name_or_id) or is_id(name_or_id)):  # nor would PostgreSQL take every string
        raise no_such_tenant()
    query = select(Tenant).where(or_(Tenant.name == name_or_id, Tenant.id == name_or_id))
    tenant = (await session.scalars(query)).one_or_none()
    if tenant is None:
        raise no_such_tenant()
    return tenant


def _check_confirmed(name: str, confirm: str | None) -> None:
    if confirm is None:
        raise InvalidRequestError(
            f"deleting a tenant removes its keys, adapters and files; to confirm, add ?confirm={name}", param="confirm"
        )
    if confirm != name:
        raise ConflictError(f"confirm is {confirm[:80]!r}, the tenant's name is {name!r}", param="confirm")
