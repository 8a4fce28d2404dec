"""`loraplex db`: the database's schema."""

from __future__ import annotations

import typer

from loraplex.platform.cli.host import DatabaseUrl, DataDir, on_host
from loraplex.platform.installation import Installation

app = typer.Typer(name="db", help="The database's schema.", no_args_is_help=True)


@app.callback()
def group() -> None:
    """The database's schema."""


@app.command()
def upgrade(data_dir: DataDir = None, database_url: DatabaseUrl = None) -> None:
    """Bring the schema to this program's version (`serve` does it too, at its start)."""

    async def work(installation: Installation) -> str:
        return f"{installation.database!r} is at revision {await installation.database.revision()}"

    typer.echo(on_host(data_dir, database_url, work))
