"""`loraplex tenant`: tenants, straight in this host's database."""

from __future__ import annotations

from typing import Annotated

import typer

from loraplex.platform.audit.service import HOST
from loraplex.platform.cli.host import DatabaseUrl, DataDir, on_host
from loraplex.platform.db.models import Tenant
from loraplex.platform.installation import Installation

app = typer.Typer(name="tenant", help="Tenants, straight in this host's database.", no_args_is_help=True)

PAGE = 500


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="1 to 63 of a-z, 0-9, '.', '_', '-'.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Make a tenant and print its id. Give it keys with `loraplex key create --tenant NAME`."""

    async def work(installation: Installation) -> str:
        return (await installation.tenants.create(name, actor=HOST)).id

    typer.echo(on_host(data_dir, database_url, work))


@app.command("list")
def list_tenants(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Print name, status and day of creation of every tenant, separated by tabs."""

    async def work(installation: Installation) -> list[Tenant]:
        tenants: list[Tenant] = []
        while page := await installation.tenants.list(after=tenants[-1].name if tenants else None, limit=PAGE):
            tenants += page
        return tenants

    for tenant in on_host(data_dir, database_url, work):
        typer.echo(f"{tenant.name}\t{tenant.status}\t{tenant.created_at:%Y-%m-%d}")


@app.command()
def delete(
    name: str,
    confirm: Annotated[str, typer.Option(help="The tenant's name again.")],
    data_dir: DataDir = None,
    database_url: DatabaseUrl = None,
) -> None:
    """Shut a tenant out at once; the server removes its keys, adapters and files when its requests have ended."""

    async def work(installation: Installation) -> str:
        return (await installation.tenants.mark_deleting(name, confirm=confirm, actor=HOST)).name

    marked = on_host(data_dir, database_url, work)
    typer.echo(f"{marked} takes no new request; the server removes it, now or when it is next started")
