"""`loraplex demo`: a real model, two real adapters, one batch, an API to play with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    *,
    once: Annotated[bool, typer.Option("--once", help="Print the answers and leave; do not keep serving.")] = False,
    directory: Annotated[Path, typer.Option("--dir", help="Where the model, the adapters and the data go.")] = Path(
        ".demo"
    ),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; the next free one if it is busy.")] = 8000,
) -> None:
    """Train two small adapters, serve them with their base, and ask all of them one question in one batch.

    Needs no GPU, no database server and no Node. The first run takes about two minutes, later ones seconds.
    """
    from rich.console import Console

    from loraplex.adapters.errors import LoraplexError
    from loraplex.platform.demo.run import run_demo

    console = Console()
    try:
        run_demo(directory.absolute(), host=host, port=port, once=once, console=console)
    except LoraplexError as error:
        console.print(f"demo: {error.message}", style="red", markup=False)
        raise typer.Exit(1) from error
