"""Uploads become immutable, numbered versions."""

from __future__ import annotations

import asyncio

from tests.platform.adapters.helpers import RegistryWorld, adapter_files, zipped


async def test_upload_makes_the_adapter_and_its_first_ready_version(world: RegistryWorld) -> None:
    reply = await world.upload("sql")
    assert (reply.status_code, reply.json()["version"], reply.json()["status"]) == (201, 1, "ready")
