"""The one secret of an installation, and the subkeys derived from it.

It is given (`LORAPLEX_SECRET_KEY`), read from a file, or made once in the data folder. Its fingerprint is kept in the
database, because with another secret every API key would be unknown without anybody being told why.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

from sqlalchemy.exc import IntegrityError

from loraplex.engine.errors import ConfigurationError
from loraplex.platform.data_folder import make_data_folder
from loraplex.platform.db.models import Setting
from loraplex.platform.db.session import Database
from loraplex.platform.settings import DataSettings

KEY_BYTES = 32
FINGERPRINT_SETTING = "secret_key_fingerprint"

logger = logging.getLogger(__name__)


class SecretKey:
    """Gives subkeys by HMAC-SHA256 with a label. Never shows itself."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) < KEY_BYTES:
            raise ConfigurationError(
                f"the secret key has {len(secret)} bytes; it must have at least {KEY_BYTES} "
                "(for example the output of: openssl rand -hex 32)",
                param="secret_key",
            )
        self._secret = secret

    def __repr__(self) -> str:
        return f"SecretKey(fingerprint={self.fingerprint})"

    def subkey(self, label: str) -> bytes:
        """32 bytes for one purpose; nothing about the secret or other subkeys follows from them."""
        return hmac.digest(self._secret, b"loraplex:" + label.encode(), hashlib.sha256)

    @property
    def fingerprint(self) -> str:
        """Tells two secrets apart; may be stored and shown."""
        return self.subkey("fingerprint").hex()[:32]

    @classmethod
    def load(cls, settings: DataSettings) -> SecretKey:
        """The secret of these settings. Makes the default file if there is none; raises ConfigurationError."""
        if settings.secret_key is not None:
            if settings.secret_key_file is not None:
                raise ConfigurationError("give secret_key or secret_key_file, not both", param="secret_key")
            return cls(_decode(settings.secret_key.get_secret_value().encode()))
        if settings.secret_key_file is not None:
            return cls(_decode(_read(settings.secret_key_file)))
        if not settings.database_url.get_secret_value().startswith("sqlite"):
            raise ConfigurationError(
                "with a database server the secret key must be given, the same on every host: set "
                "LORAPLEX_SECRET_KEY or LORAPLEX_SECRET_KEY_FILE (to make one: openssl rand -hex 32)",
                param="secret_key",
            )
        path = settings.data_dir / "secret.key"
        _create_exclusively(path)
        return cls(_decode(_read(path)))


async def check_fingerprint(database: Database, secret_key: SecretKey) -> None:
    """Remember the secret's fingerprint at the first start; later raise ConfigurationError if it is another one."""
    stored = await _stored_fingerprint(database)
    if stored is None:
        with contextlib.suppress(IntegrityError):  # another process was first: compare with what it stored
            async with database.session() as session:
                session.add(Setting(name=FINGERPRINT_SETTING, value=secret_key.fingerprint))
        stored = await _stored_fingerprint(database)
    if stored != secret_key.fingerprint:
        raise ConfigurationError(
            f"the secret key (fingerprint {secret_key.fingerprint}) is not the one this database was made with "
            f"(fingerprint {stored}): no API key would be recognised. Restore the old LORAPLEX_SECRET_KEY or "
            "secret.key, or start with another data folder or database",
            param="secret_key",
        )


async def _stored_fingerprint(database: Database) -> str | None:
    async with database.read_session() as session:
        setting = await session.get(Setting, FINGERPRINT_SETTING)
        return None if setting is None else setting.value


def _decode(given: bytes) -> bytes:
    """Raw bytes of a file that we made, 64 hex digits as bytes, or any longer text as it is."""
    if len(given) == KEY_BYTES:
        return given
    text = given.strip()
    try:
        return bytes.fromhex(text.decode()) if len(text) == 2 * KEY_BYTES else text
    except ValueError:
        return text


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        is_exposed = bool(path.stat().st_mode & 0o077)
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the secret key file {path}: {error.strerror}", param="secret_key_file"
        ) from error
    if is_exposed:
        logger.warning("the secret key file %s can be read by other users; chmod 600 it", path)
    return content


def _create_exclusively(path: Path) -> None:
    """Publish a complete file or leave the one that is there: a reader never sees a part of it."""
    if path.exists():
        return
    make_data_folder(path.parent)
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()
