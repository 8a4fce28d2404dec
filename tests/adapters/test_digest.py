from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from loraplex.adapters.digest import folder_digest, hash_file, version_digest
from tests.adapters.helpers import lora_tensors, refusal, write_adapter

A, B = "aa" * 32, "bb" * 32


def test_the_digest_of_a_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content" * 1_000_000)
    assert hash_file(tmp_path / "x") == hashlib.sha256(b"content" * 1_000_000).hexdigest()


def test_a_link_is_not_hashed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"secret")
    (tmp_path / "y").symlink_to(tmp_path / "x")
    assert refusal(lambda: hash_file(tmp_path / "y"))[0].code == "not_a_regular_file"


def test_the_order_of_the_files_does_not_matter() -> None:
    assert version_digest({"a": A, "b": B}) == version_digest({"b": B, "a": A})


@pytest.mark.parametrize("other", [{"a": B, "b": A}, {"a": A}, {"ab": A}, {"a": A, "b": B, "c": A}, {}])
def test_every_name_and_hash_counts(other: dict[str, str]) -> None:
    assert version_digest({"a": A, "b": B}) != version_digest(other)


def test_the_digest_of_a_version_is_stable() -> None:
    assert version_digest({"adapter_config.json": A, "adapter_model.safetensors": B}) == (
        "bb2902c7c18b9058c8cc8391ba267d6badb2acb33e72960dabfb2c42a2543b1b"
    )


def test_only_the_files_of_the_version_count(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "outer" / "tenantA")
    digest = folder_digest(folder)
    (folder / "README.md").write_text("hello")
    (folder / "tokenizer.json").write_text("{}")
    assert folder_digest(folder) == digest
    assert folder_digest(tmp_path / "outer") == digest
    assert len(bytes.fromhex(digest)) == 32


def test_config_and_weights_count(tmp_path: Path) -> None:
    digests = {
        folder_digest(write_adapter(tmp_path / "a")),
        folder_digest(write_adapter(tmp_path / "b", lora_alpha=8)),
        folder_digest(write_adapter(tmp_path / "c", lora_tensors(seed=1))),
    }
    assert len(digests) == 3
