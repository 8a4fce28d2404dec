from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loraplex.engine.errors import ConfigurationError
from loraplex.platform.secret_key import SecretKey, check_fingerprint
from loraplex.platform.settings import DataSettings
from tests.platform.helpers import open_database

TEXT = "a secret of more than 32 characters, as people write them"


def load(data_dir: Path, **given: object) -> SecretKey:
    return SecretKey.load(DataSettings.load(data_dir=data_dir, **given))


def test_the_default_file_is_made_once_with_32_bytes_that_only_we_can_read(tmp_path: Path) -> None:
    first = load(tmp_path / "data")
    file = tmp_path / "data" / "secret.key"
    assert len(file.read_bytes()) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["secret.key"]
    assert load(tmp_path / "data").fingerprint == first.fingerprint


def test_racing_starts_agree_on_one_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(max_workers=16) as executor:
        fingerprints = set(executor.map(lambda _: load(tmp_path).fingerprint, range(64)))
    assert len(fingerprints) == 1


def test_the_same_bytes_count_the_same_raw_and_in_hex(tmp_path: Path) -> None:
    made = load(tmp_path)
    digits = (tmp_path / "secret.key").read_bytes().hex()
    (tmp_path / "mounted").write_text(digits + "\n")
    assert load(tmp_path, secret_key=digits).fingerprint == made.fingerprint
    assert load(tmp_path, secret_key_file=tmp_path / "mounted").fingerprint == made.fingerprint


def test_subkeys_differ_by_label_and_by_secret() -> None:
    one, other = SecretKey(b"1" * 32), SecretKey(b"2" * 32)
    subkeys = {one.subkey("api-key"), one.subkey("cache-salt"), one.subkey("audit"), other.subkey("api-key")}
    assert len(subkeys) == 4
    assert {len(subkey) for subkey in subkeys} == {32}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"secret_key": "short"}, "at least 32"),
        ({"secret_key": TEXT, "secret_key_file": "/etc/hostname"}, "not both"),
        ({"secret_key_file": "/no/such/file"}, "cannot read"),
        ({"database_url": "postgresql://u:p@db/x"}, "LORAPLEX_SECRET_KEY"),
    ],
)
def test_a_secret_that_cannot_work_is_refused(tmp_path: Path, given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_text(TEXT)
    (tmp_path / "secret").chmod(0o644)
    with caplog.at_level(logging.WARNING):
        load(tmp_path, secret_key_file=tmp_path / "secret")
    assert "chmod 600" in caplog.text


def test_the_secret_does_not_show_itself() -> None:
    key = SecretKey(TEXT.encode())
    assert TEXT[:12] not in repr(key) + str(key) + key.fingerprint


async def test_another_secret_than_the_databases_refuses_to_start(tmp_path: Path) -> None:
    async with open_database(tmp_path) as database:
        await check_fingerprint(database, SecretKey(b"1" * 32))
        await check_fingerprint(database, SecretKey(b"1" * 32))
        with pytest.raises(ConfigurationError, match="not the one this database was made with"):
            await check_fingerprint(database, SecretKey(b"2" * 32))


async def test_of_racing_first_starts_with_two_secrets_only_one_secret_is_accepted(tmp_path: Path) -> None:
    async with open_database(tmp_path) as database:
        secrets = [SecretKey(bytes([number % 2 + 1]) * 32) for number in range(8)]
        outcomes = await asyncio.gather(
            *(check_fingerprint(database, secret) for secret in secrets), return_exceptions=True
        )
    accepted = {secret.fingerprint for secret, outcome in zip(secrets, outcomes, strict=True) if outcome is None}
    assert len(accepted) == 1
    assert sum(isinstance(outcome, ConfigurationError) for outcome in outcomes) == 4
