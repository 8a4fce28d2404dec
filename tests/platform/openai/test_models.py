"""AP-12: the list of models of a tenant with many adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import event, insert, select

from loraplex.platform.db.models import Adapter, AdapterAlias, AdapterVersion, Base
from loraplex.platform.openai.models import ModelCatalog
from tests.platform.adapters.helpers import RegistryWorld, open_world

NUM_ADAPTERS = 1_001  # two whole pages of the registry and one more
NAMES = [f"m{number:04}" for number in range(NUM_ADAPTERS)]


@pytest.fixture
async def crowded(tmp_path: Path) -> AsyncIterator[RegistryWorld]:
    """One tenant with very many adapters, all but the first copied row by row."""
    async with open_world(tmp_path) as world:
        await world.upload(NAMES[0])
        await world.upload("of-another-tenant", tenant="rival", headers=(await world.other_tenant("rival"))[1])
        async with world.base.installation.database.session() as session:
            for table, key in ((Adapter, "id"), (AdapterVersion, "adapter_id"), (AdapterAlias, "adapter_id")):
                mine = select(Adapter.id).where(Adapter.name == NAMES[0]).scalar_subquery()
                row = (await session.execute(select(table.__table__).where(getattr(table, key) == mine))).one()
                await session.execute(insert(table), [copied(table, dict(row._mapping), name) for name in NAMES[1:]])
        yield world


def copied(table: type[Base], row: dict[str, Any], name: str) -> dict[str, Any]:
    own: dict[str, Any] = {"id": f"{table.__name__[:12]}-{name}"}
    own |= {"name": name} if table is Adapter else {"adapter_id": f"Adapter-{name}"}
    return row | own


@contextmanager
def counted_statements(world: RegistryWorld) -> Iterator[list[str]]:
    statements: list[str] = []

    def record(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        statements.append(statement)

    engine = world.base.installation.database._engine.sync_engine
    event.listen(engine, "before_cursor_execute", record)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", record)


async def test_pages_of_a_thousand_adapters_list_each_once_in_few_queries(crowded: RegistryWorld) -> None:
    services = SimpleNamespace(
        settings=SimpleNamespace(served_model_name="tiny"),
        registry=crowded.registry,
        started_at=datetime.now(UTC),
        engine_info=None,
    )
    catalog = ModelCatalog(services)  # type: ignore[arg-type]  # only what a list needs
    seen: list[str] = []
    after: str | None = None
    while True:
        with counted_statements(crowded) as statements:
            page = await catalog.list(crowded.tenant, after=after, limit=300)
        assert 0 < len([one for one in statements if one.startswith("SELECT")]) <= 3 * 3
        assert all(model["parent"] == "tiny" for model in page["data"] if model["id"] != "tiny")
        seen += [model["id"] for model in page["data"]]
        if not page["has_more"]:
            break
        after = seen[-1]
    assert seen == ["tiny", *NAMES]
