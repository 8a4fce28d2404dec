"""Runs the Alembic scripts of `migrations/` on a connection."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.util import CommandError
from sqlalchemy import Connection, text

from loraplex.engine.errors import ConfigurationError

MIGRATIONS = Path(__file__).parents[2] / "migrations"

_ADVISORY_LOCK = 0x6C6F7261  # "lora": any constant that no other program of this database uses


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrade inside the caller's transaction, so that it happens whole or not at all.

    One process at a time: on SQLite the transaction holds the write lock already. Raises ConfigurationError if the
    schema is newer than this program.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
    try:
        command.upgrade(alembic_config(connection), revision)
    except CommandError as error:
        raise ConfigurationError(f"the database belongs to a newer LoRAplex ({error}); install that one") from error
    if connection.dialect.name == "sqlite":
        broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
        assert not broken, f"migration left rows without their parents: {broken[:5]}"


def current_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def alembic_config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
