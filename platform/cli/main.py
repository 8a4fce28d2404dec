"""The command `loraplex`. Only the module of the subcommand that is called is imported, so `--help` is quick."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import typer

# subcommand -> (module, what it holds: a group's Typer or a function, help)
_COMMANDS = {
    "serve": ("serve", "serve", "Serve a base model and its adapters over an OpenAI-compatible API."),
    "demo": ("demo", "demo", "Train two small adapters, serve them, and ask all of them at once."),
    "tenant": ("tenant", "app", "Tenants, straight in this host's database."),
    "key": ("key", "app", "API keys, straight in this host's database; also when the admin's key is lost."),
    "adapter": ("adapter", "app", "Upload, list and move adapters through a server's API."),
    "db": ("db", "app", "The database's schema."),
    "version": ("version", "version", "Print the versions of LoRAplex and of what decides the answers."),
}


def main() -> None:
    create_cli(sys.argv[1:])()


def create_cli(arguments: Sequence[str]) -> typer.Typer:
    """The whole command line; of the subcommand that `arguments` name the real one, of the others name and help."""
    cli = typer.Typer(
        name="loraplex",
        help="Many LoRA fine-tunes of one base model, for many tenants, from one engine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    for name, (module, attribute, help_text) in _COMMANDS.items():
        if name == called:
            _add(cli, name, getattr(importlib.import_module(f"loraplex.platform.cli.{module}"), attribute))
        else:
            cli.command(name, help=help_text)(_not_called)
    return cli


def _add(cli: typer.Typer, name: str, command: object) -> None:
    if isinstance(command, typer.Typer):
        cli.add_typer(command, name=name)
    else:
        assert callable(command)
        cli.command(name)(command)


def _not_called() -> None:
    """Stands in the list of commands for one that was not called."""
