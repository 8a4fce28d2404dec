"""Alembic's entry. The program passes its connection; the `alembic` command uses the settings' database."""

from __future__ import annotations

import asyncio

from alembic import context
from sqlalchemy import Connection

from loraplex.platform.db.engine import create_engine, normalize_url
from loraplex.platform.db.models import Base
from loraplex.platform.settings import DataSettings


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


async def run_on_settings_database() -> None:
    engine = create_engine(normalize_url(DataSettings.load().database_url.get_secret_value()), is_migration=True)
    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    asyncio.run(run_on_settings_database())
