from __future__ import annotations

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text

from loraplex.engine.errors import ConfigurationError
from loraplex.platform.db.engine import create_engine, normalize_url
from loraplex.platform.db.migrate import MIGRATIONS, alembic_config
from loraplex.platform.db.models import Base
from loraplex.platform.db.session import Database


def differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
    return list(compare_metadata(context, Base.metadata))


def constraint_names(connection: Connection) -> set[str]:
    inspector = inspect(connection)
    tables = set(inspector.get_table_names()) - {"alembic_version"}
    foreign = {str(key["name"]) for table in tables for key in inspector.get_foreign_keys(table)}
    return foreign | {str(inspector.get_pk_constraint(table)["name"]) for table in tables}


def downgrade(connection: Connection) -> list[str]:
    command.downgrade(alembic_config(connection), "base")
    return inspect(connection).get_table_names()


async def test_the_scripts_make_exactly_the_tables_of_the_models_and_take_them_away_again(empty_url: str) -> None:
    database = Database(empty_url)
    await database.upgrade()
    await database.upgrade()  # nothing left to do
    engine = create_engine(normalize_url(empty_url), is_migration=True)
    async with engine.begin() as connection:
        assert await connection.run_sync(differences) == []
        named = {str(c.name) for table in Base.metadata.tables.values() for c in table.constraints if c.name}
        assert {name for name in named if name[:2] in ("pk", "fk")} == await connection.run_sync(constraint_names)
        assert await connection.run_sync(downgrade) == ["alembic_version"]
    await engine.dispose()
    await database.upgrade()
    assert await database.revision() == "0001"
    await database.aclose()


async def test_a_failing_script_leaves_the_schema_as_it_was(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database(empty_url)
    with monkeypatch.context() as patched:
        patched.setattr("alembic.op.create_index", _fail)
        patched.setattr("alembic.operations.BatchOperations.create_index", _fail)
        with pytest.raises(ZeroDivisionError):
            await database.upgrade()
    async with database.read_session() as session:
        connection = await session.connection()
        assert await connection.run_sync(lambda sync: inspect(sync).get_table_names()) == []
    await database.upgrade()
    await database.aclose()


async def test_a_schema_of_a_newer_program_is_refused(empty_url: str) -> None:
    database = Database(empty_url)
    await database.upgrade()
    async with database.session() as session:
        await session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigurationError, match="newer LoRAplex"):
        await database.upgrade()
    await database.aclose()


def test_the_scripts_form_one_line() -> None:
    scripts = ScriptDirectory(str(MIGRATIONS))
    assert len(scripts.get_heads()) == 1
    assert len(scripts.get_bases()) == 1


def _fail(*_: object, **__: object) -> None:
    raise ZeroDivisionError
