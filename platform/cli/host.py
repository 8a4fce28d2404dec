"""What the commands that work on this host's own database share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.installation import Installation, open_installation
from loraplex.platform.settings import DataSettings

Result = TypeVar("Result")

DataDir = Annotated[
    Path | None, typer.Option(help="Folder of the database and the secret key, as for `serve` (LORAPLEX_DATA_DIR).")
]
DatabaseUrl = Annotated[str | None, typer.Option(help="Database, as for `serve` (LORAPLEX_DATABASE_URL).")]


def on_host(
    data_dir: Path | None, database_url: str | None, work: Callable[[Installation], Awaitable[Result]]
) -> Result:
    """Do `work` on the opened installation. An error of ours becomes one line and exit status 1."""

    async def run() -> Result:
        settings = DataSettings.load(data_dir=data_dir, database_url=database_url)
        async with open_installation(settings) as installation:
            return await work(installation)

    try:
        return asyncio.run(run())
    except LoraplexError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from None
