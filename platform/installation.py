"""Opens what an installation keeps, in the one order that is safe; for the server and for the host's commands."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from loraplex.platform.api_keys.service import ApiKeyService
from loraplex.platform.db.session import Database
from loraplex.platform.secret_key import SecretKey, check_fingerprint
from loraplex.platform.settings import DataSettings
from loraplex.platform.tenants.service import TenantService


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    database: Database
    secret_key: SecretKey
    api_keys: ApiKeyService
    tenants: TenantService


@asynccontextmanager
async def open_installation(settings: DataSettings) -> AsyncIterator[Installation]:
    """Secret, database, migrations, then the check that the two belong together.

    Raises ConfigurationError for settings that cannot work, StorageError if the database cannot be reached.
    """
    secret_key = SecretKey.load(settings)
    database = Database(settings.database_url.get_secret_value())
    try:
        await database.upgrade()
        await check_fingerprint(database, secret_key)
        api_keys = ApiKeyService(database, secret_key)
        yield Installation(
            database=database,
            secret_key=secret_key,
            api_keys=api_keys,
            tenants=TenantService(database, secret_key, api_keys),
        )
    finally:
        await database.aclose()
