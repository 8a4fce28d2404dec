from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.api_keys import cache as cache_module
from loraplex.platform.api_keys.cache import LIFETIME_S, PrincipalCache
from loraplex.platform.api_keys.principal import Principal, Scope
from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.db.models import ApiKey, AuditEvent, Tenant, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.errors import AuthenticationError, NotFoundError, PermissionDeniedError
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.tenants.service import TenantService
from tests.platform.helpers import open_database

SECRET = SecretKey(b"0" * 32)


async def create(service: ApiKeyService, *scopes: Scope) -> tuple[str, str]:
    """Secret and id of a platform key."""
    created = await service.create(name="k", scopes=scopes or [Scope.INFER], tenant=None, granted_by=None)
    return created.secret, created.key.id


async def test_a_key_has_the_documented_form_and_only_its_hmac_is_stored(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        created = await ApiKeyService(database, SECRET).create(
            name="k", scopes=[Scope.INFER], tenant=None, granted_by=None
        )
        async with database.read_session() as session:
            row = (await session.scalars(select(ApiKey))).one()
            audited = (await session.scalars(select(AuditEvent))).one()
    assert len(created.secret) == len("lpx_") + 43
    assert created.secret.startswith("lpx_")
    assert row.prefix == created.secret[:12]
    stored = b"".join(path.read_bytes() for path in data_dir.glob("loraplex.db*"))
    assert created.secret[12:].encode() not in stored
    assert created.secret not in repr(created)
    assert (audited.action, audited.target, audited.actor) == ("key.create", created.key.id, "host")


async def test_a_key_is_known_with_its_scopes_and_by_this_installations_secret_only(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        secret, key_id = await create(ApiKeyService(database, SECRET), Scope.INFER, Scope.METRICS_READ)
        principal = await ApiKeyService(database, SECRET).authenticate(secret)
        assert principal == Principal(key_id=key_id, tenant=None, scopes=frozenset({Scope.INFER, Scope.METRICS_READ}))
        with pytest.raises(AuthenticationError):
            await ApiKeyService(database, SecretKey(b"1" * 32)).authenticate(secret)


@pytest.mark.parametrize("secret", ["", "lpx_", "x" * 31, "lpx_" + "a" * 43, "lpx_" + "ä" * 43, "x" * 201, "a b" * 20])
async def test_what_is_no_key_is_refused(data_dir: Path, secret: str) -> None:
    async with open_database(data_dir) as database:
        with pytest.raises(AuthenticationError):
            await ApiKeyService(database, SECRET).authenticate(secret)


async def test_a_key_that_differs_in_its_last_character_is_unknown(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        secret, _ = await create(service)
        await service.authenticate(secret)
        with pytest.raises(AuthenticationError):
            await service.authenticate(secret[:-1] + ("a" if secret[-1] != "a" else "b"))


async def test_a_revocation_counts_at_once_also_for_a_key_in_use(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        secret, key_id = await create(service)
        await service.authenticate(secret)
        await service.revoke(key_id, None, actor="host")
        with pytest.raises(AuthenticationError):
            await service.authenticate(secret)
        await service.revoke(key_id, None, actor="host")  # again changes nothing
        async with database.read_session() as session:
            actions = (await session.scalars(select(AuditEvent.action).order_by(AuditEvent.id))).all()
        assert actions == ["key.create", "key.revoke"]


async def test_another_processs_revocation_counts_when_the_entry_is_stale(data_dir: Path) -> None:
    now = [100.0]
    async with open_database(data_dir) as database:
        here = ApiKeyService(database, SECRET, cache=PrincipalCache(clock=lambda: now[0]))
        elsewhere = ApiKeyService(database, SECRET)
        secret, key_id = await create(here)
        await here.authenticate(secret)
        await elsewhere.revoke(key_id, None, actor="host")
        now[0] += LIFETIME_S
        with pytest.raises(AuthenticationError):
            await here.authenticate(secret)


async def test_an_expired_key_is_refused_also_when_it_expires_in_use(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        created = await service.create(
            name="k",
            scopes=[Scope.INFER],
            tenant=None,
            granted_by=None,
            expires_at=utc_now() + timedelta(milliseconds=300),
        )
        await service.authenticate(created.secret)
        await asyncio.sleep(0.35)
        with pytest.raises(AuthenticationError):
            await service.authenticate(created.secret)


def test_a_look_up_that_began_before_a_revocation_is_not_remembered() -> None:
    cache = PrincipalCache()
    principal = Principal(key_id="key_1", tenant=None, scopes=frozenset())
    began = cache.generation
    cache.forget(lambda _: True)
    cache.put(b"1", principal, expires_at=None, generation=began)
    assert cache.get(b"1") is None
    cache.put(b"1", principal, expires_at=None, generation=cache.generation)
    assert cache.get(b"1") == principal


def test_the_cache_is_bounded_and_keeps_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "CAPACITY", 2)
    cache = PrincipalCache()
    principal = Principal(key_id="key_1", tenant=None, scopes=frozenset())
    for digest in (b"1", b"2", b"1", b"3"):
        if cache.get(digest) is None:
            cache.put(digest, principal, expires_at=None, generation=0)
    assert [digest for digest in (b"1", b"2", b"3") if cache.get(digest)] == [b"1", b"3"]


async def make_tenant(database: Database, service: ApiKeyService) -> TenantService:
    tenants = TenantService(database, SECRET, service)
    await tenants.create("acme", actor="host")
    return tenants


async def test_a_caller_grants_only_what_it_holds(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        acme = await (await make_tenant(database, service)).context("acme")
        admin = Principal(key_id="key_1", tenant=acme, scopes=frozenset({Scope.TENANT_ADMIN, Scope.INFER}))
        await service.create(name="k", scopes=[Scope.INFER], tenant=acme, granted_by=admin)
        with pytest.raises(PermissionDeniedError, match="adapters:write"):
            await service.create(name="k", scopes=[Scope.INFER, Scope.ADAPTERS_WRITE], tenant=acme, granted_by=admin)


async def test_a_platform_admin_grants_every_scope_but_its_own_to_a_tenant(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        acme = await (await make_tenant(database, service)).context("acme")
        admin = Principal(key_id="key_1", tenant=None, scopes=frozenset({Scope.PLATFORM_ADMIN}))
        grantable = set(Scope) - {Scope.PLATFORM_ADMIN}
        created = await service.create(name="k", scopes=grantable, tenant=acme, granted_by=admin)
        assert (await service.authenticate(created.secret)).scopes == grantable
        with pytest.raises(InvalidRequestError, match="never"):
            await service.create(name="k", scopes=[Scope.PLATFORM_ADMIN], tenant=acme, granted_by=admin)


async def test_a_grant_that_is_never_right_is_refused(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        with pytest.raises(InvalidRequestError, match="at least one scope"):
            await service.create(name="k", scopes=[], tenant=None, granted_by=None)
        with pytest.raises(InvalidRequestError, match="past"):
            await service.create(
                name="k", scopes=[Scope.INFER], tenant=None, granted_by=None, expires_at=utc_now() - timedelta(1)
            )


async def test_a_key_is_revoked_only_where_it_belongs(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        tenants = await make_tenant(database, service)
        acme = await tenants.context("acme")
        secret, key_id = await create(service)
        for wrong_id, owner in ((key_id, acme), ("key_unknown", None)):
            with pytest.raises(NotFoundError):
                await service.revoke(wrong_id, owner, actor="host")
        await service.authenticate(secret)


async def test_the_salt_of_a_tenant_is_stable_its_own_and_not_what_the_database_holds(data_dir: Path) -> None:
    async with open_database(data_dir) as database:
        service = ApiKeyService(database, SECRET)
        tenants = await make_tenant(database, service)
        await tenants.create("other", actor="host")
        created = await service.create(
            name="k", scopes=[Scope.INFER], tenant=await tenants.context("acme"), granted_by=None
        )
        principal = await service.authenticate(created.secret)
        async with database.read_session() as session:
            stored = set((await session.scalars(select(Tenant.cache_salt))).all())
        acme, other = await tenants.context("acme"), await tenants.context("other")
        assert principal.tenant == acme
        assert acme.cache_salt != other.cache_salt
        assert len(acme.cache_salt) == 32
        assert not {acme.cache_salt, other.cache_salt} & stored
        assert acme.cache_salt.hex() not in repr(principal)
        assert repr(acme.cache_salt) not in repr(principal)
