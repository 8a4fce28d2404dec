from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.db.models import utc_now
from tests.platform.helpers import bearer, open_base_world

KEYS = "/api/v1/tenants/acme/keys"


async def test_a_created_key_shows_its_secret_once_and_works(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        await world.tenant("acme")
        body = {"name": "ci", "scopes": ["tenant:admin", "infer"]}
        created = await world.client.post(KEYS, json=body, headers=world.admin)
        assert created.status_code == 201
        secret = created.json()["secret"]
        listed = await world.client.get(KEYS, headers=bearer(secret))
        shown = listed.json()["data"]
        assert shown == [{name: value for name, value in created.json().items() if name != "secret"}]
        assert shown[0]["prefix"] == secret[:12]
        assert secret not in listed.text


async def test_a_revoked_key_is_401_at_once_and_stays_in_the_list(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        headers = await world.key(Scope.TENANT_ADMIN, tenant=acme)
        key = (await world.client.get(KEYS, headers=headers)).json()["data"][0]
        for _ in range(2):
            assert (await world.client.delete(f"{KEYS}/{key['id']}", headers=world.admin)).status_code == 204
        assert (await world.client.get(KEYS, headers=headers)).status_code == 401
        assert (await world.client.get(KEYS, headers=world.admin)).json()["data"][0]["revoked_at"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": ["infer"]}, "name"),
        ({"name": "", "scopes": ["infer"]}, "name"),
        ({"name": "x" * 101, "scopes": ["infer"]}, "name"),
        ({"name": "k", "scopes": []}, "scopes"),
        ({"name": "k", "scopes": ["root"]}, "scopes.0"),
        ({"name": "k", "scopes": ["infer"], "tenant": "x"}, "tenant"),
        ({"name": "k", "scopes": ["infer"], "expires_at": "2020-01-01T00:00:00Z"}, "expires_at"),
        ({"name": "k", "scopes": ["infer"], "expires_at": "2090-01-01T00:00:00"}, "expires_at"),
        ({"name": "k", "scopes": ["platform:admin"]}, "scopes"),
    ],
)
async def test_a_wrong_key_is_400_and_names_the_field(data_dir: Path, body: dict[str, object], param: str) -> None:
    async with open_base_world(data_dir) as world:
        await world.tenant("acme")
        reply = await world.client.post(KEYS, json=body, headers=world.admin)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert (await world.client.get(KEYS, headers=world.admin)).json()["data"] == []


@pytest.mark.parametrize("scope", ["adapters:write", "platform:admin"])
async def test_a_tenants_admin_cannot_grant_more_than_it_holds(data_dir: Path, scope: str) -> None:
    async with open_base_world(data_dir) as world:
        headers = await world.key(Scope.TENANT_ADMIN, Scope.INFER, tenant=await world.tenant("acme"))
        allowed = await world.client.post(KEYS, json={"name": "k", "scopes": ["infer"]}, headers=headers)
        assert allowed.status_code == 201
        reply = await world.client.post(KEYS, json={"name": "k", "scopes": ["infer", scope]}, headers=headers)
        assert reply.status_code == 403
        assert scope in reply.json()["error"]["message"]


async def test_platform_keys_are_the_platform_admins_business_only(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme = await world.tenant("acme")
        tenant_admin = await world.key(*(set(Scope) - {Scope.PLATFORM_ADMIN}), tenant=acme)
        platform_reader = await world.key(*(set(Scope) - {Scope.PLATFORM_ADMIN}))
        body = {"name": "k", "scopes": ["platform:admin"]}
        for headers in (tenant_admin, platform_reader):
            assert (await world.client.post("/api/v1/keys", json=body, headers=headers)).status_code == 403
        created = await world.client.post("/api/v1/keys", json=body, headers=world.admin)
        assert created.status_code == 201
        new_admin = bearer(created.json()["secret"])
        assert (await world.client.get("/api/v1/tenants", headers=new_admin)).status_code == 200
        path = f"/api/v1/keys/{created.json()['id']}"
        assert (await world.client.delete(path, headers=world.admin)).status_code == 204
        assert (await world.client.get("/api/v1/tenants", headers=new_admin)).status_code == 401


async def test_a_key_is_found_only_below_its_owner(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        acme, other = await world.tenant("acme"), await world.tenant("other")
        headers = await world.key(Scope.TENANT_ADMIN, tenant=other)
        await world.key(Scope.INFER, tenant=acme)
        key = (await world.client.get(KEYS, headers=world.admin)).json()["data"][0]
        for path in (f"/api/v1/tenants/other/keys/{key['id']}", f"/api/v1/keys/{key['id']}", f"{KEYS}/key_none"):
            assert (await world.client.delete(path, headers=world.admin)).status_code == 404
        assert (await world.client.delete(f"{KEYS}/{key['id']}", headers=headers)).status_code == 404
        assert (await world.client.get(KEYS, headers=world.admin)).json()["data"][0]["revoked_at"] is None


async def test_an_expiry_is_kept_and_shown(data_dir: Path) -> None:
    async with open_base_world(data_dir) as world:
        await world.tenant("acme")
        expires_at = (utc_now() + timedelta(days=1)).isoformat()
        body = {"name": "k", "scopes": ["infer"], "expires_at": expires_at}
        created = await world.client.post(KEYS, json=body, headers=world.admin)
        assert created.json()["expires_at"].replace("Z", "+00:00") == expires_at
