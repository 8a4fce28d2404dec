"""The first platform admin's key: given by the operator, or made at the first start and handed over once."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from pathlib import Path
from typing import TextIO

from sqlalchemy.exc import IntegrityError

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.api_keys.service import ApiKeyService, CreatedKey
from loraplex.platform.audit.service import HOST, record
from loraplex.platform.db.models import Setting, utc_now
from loraplex.platform.db.session import Database
from loraplex.platform.settings import Settings

BOOTSTRAPPED_SETTING = "bootstrapped_at"
ADMIN_KEY_FILE = "admin.key"

logger = logging.getLogger(__name__)


async def bootstrap(
    settings: Settings, database: Database, api_keys: ApiKeyService, *, terminal: TextIO | None = None
) -> None:
    """Make the admin's key at the very first start; one process wins, the others do nothing.

    A generated key is printed to `terminal` (by default standard error, if that is one), else written to `admin.key`
    in the data folder. If it is lost: `loraplex key create --platform-admin` on the host.
    """
    async with database.read_session() as session:
        if await session.get(Setting, BOOTSTRAPPED_SETTING) is not None:
            return
    given = settings.admin_key.get_secret_value() if settings.admin_key else None
    created = api_keys.new_key(name="bootstrap", scopes=[Scope.PLATFORM_ADMIN], tenant_id=None, secret=given)
    terminal = terminal or (sys.stderr if sys.stderr.isatty() else None)
    key_file = settings.data_dir / ADMIN_KEY_FILE if given is None and terminal is None else None
    try:
        await _store(database, created, key_file=key_file)
    except IntegrityError:
        return  # another process was first
    if key_file is not None:
        logger.warning("the platform admin's key was written to %s; keep it safe and delete the file", key_file)
    elif given is None and terminal is not None:
        terminal.write(f"\nThe platform admin's key, shown this once:\n\n    {created.secret}\n\n")
        terminal.flush()


async def _store(database: Database, created: CreatedKey, *, key_file: Path | None) -> None:
    async with database.session() as session:
        session.add(Setting(name=BOOTSTRAPPED_SETTING, value=utc_now().isoformat()))
        await session.flush()  # raises here for all but one
        session.add(created.key)
        record(session, actor=HOST, action="key.create", target=created.key.id, detail={"name": created.key.name})
        if key_file is not None:
            _write_private(key_file, created.secret + "\n")  # before the commit: no key that nobody knows


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
