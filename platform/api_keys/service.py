"""Makes, finds and revokes API keys. Only an HMAC of a key is stored; the key itself is shown once."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.api_keys.cache import PrincipalCache
from loraplex.platform.api_keys.principal import Principal, Scope, TenantContext
from loraplex.platform.audit.service import HOST, record
from loraplex.platform.db.models import ApiKey, Tenant, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.errors import (
    AuthenticationError,
    NotFoundError,
    PermissionDeniedError,
)
from loraplex.platform.ids import is_id, new_id
from loraplex.platform.keyed_lock import KeyedLock
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.tenants.context import TenantContexts

KEY_PREFIX = "lpx_"
SHOWN_CHARACTERS = 12

_POSSIBLE_KEY = re.compile(r"[\x21-\x7e]{32,200}")  # ours, and an operator's LORAPLEX_ADMIN_KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedKey:
    """A new key with its secret, which cannot be had again."""

    key: ApiKey
    secret: str

    def __repr__(self) -> str:
        return f"CreatedKey({self.key.id})"


class ApiKeyService:
    """Keys of tenants, and platform keys (tenant None)."""

    def __init__(self, database: Database, secret_key: SecretKey, *, cache: PrincipalCache | None = None) -> None:
        self._database = database
        self._pepper = secret_key.subkey("api-key")
        self._contexts = TenantContexts(secret_key)
        self._cache = PrincipalCache() if cache is None else cache
        self._looking_up = KeyedLock()

    async def authenticate(self, secret: str) -> Principal:
        """Who holds this key. Raises AuthenticationError if it is unknown, revoked or expired.

        A revocation by this process counts at once, one by another process within seconds.
        """
        if not _POSSIBLE_KEY.fullmatch(secret):
            raise AuthenticationError("this is not an API key; keys look like lpx_ and 43 characters")
        digest = self._digest(secret)
        cached = self._cache.get(digest)
        if cached is not None:
            return cached
        async with self._looking_up.hold(digest.hex()):  # of many requests with one key, one asks the database
            return self._cache.get(digest) or await self._look_up(digest)

    async def create(
        self,
        *,
        name: str,
        scopes: Collection[Scope],
        tenant: TenantContext | None,
        granted_by: Principal | None,
        expires_at: datetime | None = None,
        secret: str | None = None,
    ) -> CreatedKey:
        """A new key. `granted_by` None is the host itself, which holds every scope.

        Raises PermissionDeniedError for scopes that the caller lacks, InvalidRequestError for a request that is never
        right.
        """
        _check_grant(scopes, tenant=tenant, granted_by=granted_by, expires_at=expires_at)
        created = self.new_key(name=name, scopes=scopes, tenant_id=tenant.id if tenant else None, secret=secret)
        created.key.expires_at = expires_at
        async with self._database.session() as session:
            session.add(created.key)
            record(
                session,
                actor=granted_by.key_id if granted_by else HOST,
                action="key.create",
                target=created.key.id,
                tenant=tenant.name if tenant else None,
                detail={"name": name, "scopes": created.key.scopes},
            )
        return created

    def new_key(
        self, *, name: str, scopes: Collection[Scope], tenant_id: str | None, secret: str | None = None
    ) -> CreatedKey:
        """A key that is not stored yet."""
        secret = secret or KEY_PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            id=new_id("key"),
            tenant_id=tenant_id,
            name=name,
            key_hmac=self._digest(secret),
            prefix=secret[:SHOWN_CHARACTERS],
            scopes=sorted({scope.value for scope in scopes}),
            created_at=utc_now(),
        )
        return CreatedKey(key=key, secret=secret)

    async def list(self, tenant: TenantContext | None, *, after: str | None, limit: int) -> Sequence[ApiKey]:
        """Keys of a tenant, or platform keys, in the order of their ids; revoked ones too."""
        owned = ApiKey.tenant_id.is_(None) if tenant is None else ApiKey.tenant_id == tenant.id
        query = select(ApiKey).where(owned).order_by(ApiKey.id).limit(limit)
        if after is not None:
            query = query.where(ApiKey.id > after)
        async with self._database.read_session() as session:
            return (await session.scalars(query)).all()

    async def revoke(self, key_id: str, tenant: TenantContext | None, *, actor: str) -> None:
        """From now on the key is unknown. Raises NotFoundError if the tenant (or the platform) has no such key."""
        async with self._database.session() as session:
            key = await session.get(ApiKey, key_id) if is_id(key_id) else None
            if key is None or key.tenant_id != (tenant.id if tenant else None):
                raise NotFoundError("no such key", param="key")
            if key.revoked_at is None:
                key.revoked_at = utc_now()
                record(
                    session,
                    actor=actor,
                    action="key.revoke",
                    target=key_id,
                    tenant=tenant.name if tenant else None,
                )
        self._cache.forget(lambda principal: principal.key_id == key_id)

    def forget_tenant(self, tenant_id: str) -> None:
        """Look its keys up again: the tenant is going."""
        self._cache.forget(lambda principal: principal.tenant is not None and principal.tenant.id == tenant_id)

    def _digest(self, secret: str) -> bytes:
        return hmac.digest(self._pepper, secret.encode(), hashlib.sha256)

    async def _look_up(self, digest: bytes) -> Principal:
        generation = self._cache.generation
        key, tenant = await self._find(digest)
        principal = self._principal(key, tenant)
        self._cache.put(digest, principal, expires_at=key.expires_at, generation=generation)
        return principal

    async def _find(self, digest: bytes) -> tuple[ApiKey, Tenant | None]:
        query = select(ApiKey, Tenant).outerjoin(Tenant, ApiKey.tenant_id == Tenant.id).where(ApiKey.key_hmac == digest)
        async with self._database.read_session() as session:
            found = (await session.execute(query)).one_or_none()
        if found is None or found[0].revoked_at is not None:
            raise AuthenticationError("this API key is unknown or was revoked")
        key: ApiKey = found[0]
        if key.expires_at is not None and key.expires_at <= utc_now():
            raise AuthenticationError("this API key has expired")
        return key, found[1]

    def _principal(self, key: ApiKey, tenant: Tenant | None) -> Principal:
        return Principal(
            key_id=key.id,
            tenant=None if tenant is None else self._contexts.of(tenant),
            scopes=frozenset(Scope(scope) for scope in key.scopes if scope in set(Scope)),
        )


def _check_grant(
    scopes: Collection[Scope],
    *,
    tenant: TenantContext | None,
    granted_by: Principal | None,
    expires_at: datetime | None,
) -> None:
    if not scopes:
        raise InvalidRequestError(f"give at least one scope of: {', '.join(Scope)}", param="scopes")
    if granted_by is not None and not granted_by.is_platform_admin:
        lacking = sorted(set(scopes) - granted_by.scopes)
        if lacking:
            raise PermissionDeniedError(f"a key grants only scopes that it holds; this one lacks {', '.join(lacking)}")
    if tenant is not None and Scope.PLATFORM_ADMIN in scopes:
        raise InvalidRequestError("a tenant's key never holds platform:admin; use POST /api/v1/keys", param="scopes")
    if expires_at is not None and expires_at <= utc_now():
        raise InvalidRequestError("expires_at is in the past", param="expires_at")
