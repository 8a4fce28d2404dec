from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.engine.config import GIB
from loraplex.engine.errors import ConfigurationError
from loraplex.platform.secret_key import SecretKey
from loraplex.platform.settings import DataSettings, Settings, redact_url
from tests.platform.helpers import create_settings

SCRIPTED_FLAGS = """
model served-model-name host port data-dir database-url dtype max-model-len max-num-seqs max-num-batched-tokens
block-size gpu-memory-utilization kv-cache-memory-gib adapter-slots adapter-memory-gib adapter-host-memory-gib
slot-rank lora-dtype max-lora-rank enforce-eager skip-tokenizer-init tensor-parallel-size cors-origin metrics-public
shutdown-grace-s
"""


@pytest.mark.parametrize("flag", SCRIPTED_FLAGS.split())
def test_every_flag_that_others_script_against_is_a_setting_with_a_description(flag: str) -> None:
    assert Settings.model_fields[flag.replace("-", "_")].description


def test_a_flag_wins_over_the_environment_and_the_environment_over_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORAPLEX_PORT", "9001")
    monkeypatch.setenv("LORAPLEX_BLOCK_SIZE", "32")
    settings = create_settings(tmp_path, port=9002, block_size=None)
    assert (settings.port, settings.block_size, settings.max_num_seqs) == (9002, 32, 64)


def test_names_and_places_follow_from_the_model_and_the_data_folder(tmp_path: Path) -> None:
    settings = create_settings(tmp_path, model="/models/SmolLM2-135M/")
    assert settings.served_model_name == "SmolLM2-135M"
    assert settings.database_url.get_secret_value() == f"sqlite+aiosqlite:///{tmp_path / 'loraplex.db'}"
    assert settings.store_url.get_secret_value() == f"file://{tmp_path / 'store'}"


def test_a_relative_data_folder_is_made_absolute() -> None:
    assert DataSettings.load(data_dir="here").data_dir == Path.cwd() / "here"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2"),
        ({"kv_cache_memory_gib": 1, "gpu_memory_utilization": 0.5}, "not both"),
        ({"port": "http"}, "--port (LORAPLEX_PORT)"),
        ({"port": 70000}, "--port (LORAPLEX_PORT)"),
        ({"served_model_name": "base:x"}, "--served-model-name"),
        ({"model": "/models/my model"}, "--served-model-name"),
        ({"admin_key": "short"}, "--admin-key (LORAPLEX_ADMIN_KEY)"),
        ({"admin_key": "x" * 201}, "--admin-key"),
        ({"admin_key": "with a space " * 4}, "--admin-key"),
        ({"no_such_setting": 1}, "--no-such-setting"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_by_its_name(
    tmp_path: Path, given: dict[str, object], named: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_settings(tmp_path, **given)
    assert named in caught.value.message


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Settings.load(port=-1, block_size=0)
    assert all(name in caught.value.message for name in ("--model", "--port", "--block-size"))


def test_a_refused_secret_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        create_settings(tmp_path, admin_key="hush-hush")
    assert "hush" not in caught.value.message


def test_cors_origins_come_from_a_comma_separated_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_CORS_ORIGIN", "https://a.example, https://b.example")
    assert create_settings(tmp_path).cors_origin == ("https://a.example", "https://b.example")


def test_memory_in_gib_reaches_the_engine_in_bytes(tmp_path: Path) -> None:
    config = create_settings(tmp_path, kv_cache_memory_gib=0.5, adapter_memory_gib=2, dtype="float32").engine_config()
    assert config.kv_cache_memory_bytes == GIB // 2
    assert config.adapter_memory_bytes == 2 * GIB
    assert config.dtype == "float32"


def test_what_the_engine_refuses_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="adapter_slots or adapter_memory_gib"):
        create_settings(tmp_path, adapter_slots=4, adapter_memory_gib=1).engine_config()


def test_secrets_are_not_shown(tmp_path: Path) -> None:
    settings = create_settings(
        tmp_path,
        secret_key="secret-" * 8,
        admin_key="admin-key-" * 4,
        database_url="postgresql://u:password@db/name",
        store_url="s3://id:access@bucket/x",
    )
    shown = repr(settings) + str(settings) + settings.model_dump_json()
    assert not [word for word in ("secret-secret", "admin-key-admin", "password", "access") if word in shown]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:hush@db:5432/name?sslmode=require&password=hush", "postgresql://user:***@db:5432/name"),
        ("s3://id:hush@bucket/prefix", "s3://id:***@bucket/prefix"),
        ("sqlite+aiosqlite:////var/lib/loraplex.db", "sqlite+aiosqlite:////var/lib/loraplex.db"),
        ("hush", "(not a URL)"),
    ],
)
def test_urls_are_shown_without_passwords(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_a_mistyped_variable_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("LORAPLEX_MAX_NUM_SEQ", "LORAPLEX_MAX_NUM_SEQS", "LORAPLEX_URL"):
        monkeypatch.setenv(name, "3")
    create_settings(tmp_path)
    assert [record.args for record in caplog.records] == [("LORAPLEX_MAX_NUM_SEQ",)]


def test_a_data_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot write to the data folder"):
        SecretKey.load(create_settings(tmp_path / "file" / "data"))
