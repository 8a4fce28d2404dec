"""`loraplex version`."""

from __future__ import annotations

import platform
from importlib.metadata import version as installed_version

import typer

app = typer.Typer()


@app.command()
def version() -> None:
    """Print the versions of LoRAplex, of Python and of what decides the answers."""
    typer.echo(f"loraplex {installed_version('loraplex')}")
    typer.echo(f"python {platform.python_version()}")
    for name in ("torch", "transformers"):
        typer.echo(f"{name} {installed_version(name)}")
