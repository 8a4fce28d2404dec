"""`loraplex serve`: every setting is a flag, and a variable LORAPLEX_<NAME> in the environment.

Secrets are no flags: other users of the machine can read a command line.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.errors import ConfigurationError
from loraplex.platform.settings import ENV_PREFIX, Settings

EXIT_FAILED = 1
EXIT_CONFIGURATION = 2

_ONLY_ENVIRONMENT = frozenset({"secret_key", "admin_key"})


def serve(**given: Any) -> None:
    """Serve one base model, and any number of adapters for any number of tenants, over an OpenAI-compatible API.

    At the first start the platform admin's key is printed, or written to admin.key in the data folder (give your own
    as LORAPLEX_ADMIN_KEY). With it, create tenants and keys, upload adapters, and ask.

    Exit status: 0 after SIGTERM, 1 if the server could not go on, 2 for settings that cannot work.
    """
    from loraplex.platform.cli.summary import print_summary
    from loraplex.platform.serve import serve as serve_settings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    for chatty in ("alembic", "httpx", "uvicorn"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = Settings.load(**{name: value for name, value in given.items() if value not in (None, [])})
        asyncio.run(serve_settings(settings, print_summary))
    except LoraplexError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_FAILED) from None


def _parameters() -> Iterator[inspect.Parameter]:
    """Values stay text: the settings know their types, and say what is wrong in one way for flags and variables."""
    for name, field in Settings.model_fields.items():
        if name in _ONLY_ENVIRONMENT:
            continue
        option = typer.Option(f"--{name.replace('_', '-')}", help=_help(name, field), metavar=_metavar(field))
        kind: Any = bool if field.annotation is bool else list[str] if isinstance(field.default, tuple) else str
        yield inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
        )


def _help(name: str, field: FieldInfo) -> str:
    notes = [f"env: {ENV_PREFIX}{name.upper()}"]
    if field.default not in (PydanticUndefined, None, False, ()):
        notes.insert(0, f"default: {field.default}")
    elif field.is_required():
        notes.insert(0, "required")
    return f"{field.description} ({'; '.join(notes)})"


def _metavar(field: FieldInfo) -> str | None:
    if field.annotation is bool:
        return None
    text = str(field.annotation)
    return "N" if "int" in text else "X" if "float" in text and "Literal" not in text else "TEXT"


serve.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]  # what typer reads
