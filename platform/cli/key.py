"""`loraplex key`: API keys, straight in this host's database. Also the way back in when the admin's key is lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from loraplex.platform.api_keys.principal import Scope, TenantContext
from loraplex.platform.audit.service import HOST
from loraplex.platform.cli.host import DatabaseUrl, DataDir, on_host
from loraplex.platform.db.models import ApiKey, utc_now
from loraplex.platform.installation import Installation

app = typer.Typer(
    name="key", help="API keys, straight in this host's database, whoever holds keys.", no_args_is_help=True
)

PAGE = 500

TenantName = Annotated[str | None, typer.Option(help="The tenant whose keys are meant. Without it: platform keys.")]


@app.command()
def create(
    *,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "made on the host",
    tenant: TenantName = None,
    scopes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(Scope)}.")] = "",
    platform_admin: Annotated[
        bool, typer.Option("--platform-admin", help="A platform key that may do everything.")
    ] = False,
    expires_in_days: Annotated[int | None, typer.Option(min=1, help="Days until it stops working.")] = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key and print it, this once."""
    if platform_admin == bool(scopes) or (platform_admin and tenant is not None):
        raise typer.BadParameter("give either --platform-admin alone, or --scopes (and --tenant for a tenant's key)")
    granted = [Scope.PLATFORM_ADMIN] if platform_admin else _parse_scopes(scopes)
    expires_at = None if expires_in_days is None else utc_now() + timedelta(days=expires_in_days)

    async def work(installation: Installation) -> str:
        owner = await _owner(installation, tenant)
        created = await installation.api_keys.create(
            name=name, scopes=granted, tenant=owner, granted_by=None, expires_at=expires_at
        )
        return created.secret

    typer.echo(on_host(data_dir, database_url, work))


@app.command("list")
def list_keys(tenant: TenantName = None, data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Print id, first characters, state, scopes and name of every key, separated by tabs."""

    async def work(installation: Installation) -> list[ApiKey]:
        owner = await _owner(installation, tenant)
        keys: list[ApiKey] = []
        while page := await installation.api_keys.list(owner, after=keys[-1].id if keys else None, limit=PAGE):
            keys += page
        return keys

    for key in on_host(data_dir, database_url, work):
        typer.echo("\t".join([key.id, key.prefix, _state(key), ",".join(key.scopes), key.name]))


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `list` prints it.")],
    tenant: TenantName = None,
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a key unknown. A running server takes notice within seconds."""

    async def work(installation: Installation) -> None:
        await installation.api_keys.revoke(key_id, await _owner(installation, tenant), actor=HOST)

    on_host(data_dir, database_url, work)
    typer.echo(f"{key_id} is revoked")


async def _owner(installation: Installation, tenant: str | None) -> TenantContext | None:
    return None if tenant is None else await installation.tenants.context(tenant)


def _parse_scopes(given: str) -> list[Scope]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    unknown = sorted(set(names) - set(Scope))
    if unknown or not names:
        raise typer.BadParameter(f"unknown scopes {', '.join(unknown) or '(none given)'}; allowed: {', '.join(Scope)}")
    return [Scope(name) for name in names]


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return "revoked"
    return "expired" if key.expires_at is not None and key.expires_at <= utc_now() else "active"
