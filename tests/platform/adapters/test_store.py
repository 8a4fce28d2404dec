"""The store, and the engine process's way to what lies in it."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.adapters.digest import folder_digest, hash_file
from loraplex.adapters.errors import AdapterLoadError
from loraplex.engine.errors import ConfigurationError
from loraplex.platform.errors import StorageError
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.storage.engine_source import StoreSource, create_source
from loraplex.platform.storage.manifest import StoredFile
from tests.platform.adapters.helpers import adapter_files


def create_store(folder: Path, *, max_cache_bytes: int = 1 << 30) -> ArtifactStore:
    return ArtifactStore((folder / "store").as_uri(), cache_dir=folder / "cache", max_cache_bytes=max_cache_bytes)


def open_source(store: ArtifactStore) -> StoreSource:
    """As the engine process does it: from options that went through JSON."""
    return create_source(**json.loads(json.dumps(store.source_options)))


async def put(store: ArtifactStore, folder: Path, files: Mapping[str, bytes]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    stored = {name: StoredFile(sha256=hash_file(folder / name), size=len(content)) for name, content in files.items()}
    digest = folder_digest(folder)
    await store.put_version(digest, folder, stored)
    return digest


async def test_the_source_brings_exactly_the_files_that_were_put(tmp_path: Path) -> None:
    store, files = create_store(tmp_path), adapter_files()
    digest = await put(store, tmp_path / "upload", files)
    folder = open_source(store).fetch(digest)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


async def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    await put(store, tmp_path / "upload", adapter_files())
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()}
    await put(store, tmp_path / "again", adapter_files())
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*") if path.is_file()} == written


async def test_a_file_that_was_damaged_in_the_store_is_mended_by_an_upload(tmp_path: Path) -> None:
    store, files = create_store(tmp_path), adapter_files()
    digest = await put(store, tmp_path / "upload", files)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            os.truncate(path, 10)
    with pytest.raises(AdapterLoadError):
        open_source(store).fetch(digest)
    await put(store, tmp_path / "upload", files)
    assert (open_source(store).fetch(digest) / "adapter_config.json").read_bytes() == files["adapter_config.json"]


async def test_a_large_file_is_streamed_whole_or_not_at_all(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    content = os.urandom(20 << 20)
    digest = await put(store, tmp_path / "upload", {"adapter_model.safetensors": content})
    assert (open_source(store).fetch(digest) / "adapter_model.safetensors").read_bytes() == content
    assert list((tmp_path / "store").rglob("*#*")) == []


@pytest.mark.parametrize("what", ["blobs", "manifests"])
async def test_what_vanished_from_the_store_is_named(tmp_path: Path, what: str) -> None:
    store = create_store(tmp_path)
    digest = await put(store, tmp_path / "upload", adapter_files())
    shutil.rmtree(tmp_path / "store" / what)
    with pytest.raises(AdapterLoadError, match=f"{digest[:12]} are missing from the store"):
        open_source(store).fetch(digest)
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half fetched stays"


@pytest.mark.parametrize("what", ["blobs", "manifests"])
async def test_what_was_altered_in_the_store_is_never_handed_out(tmp_path: Path, what: str) -> None:
    store = create_store(tmp_path)
    digest = await put(store, tmp_path / "upload", adapter_files())
    for path in (tmp_path / "store" / what).iterdir():
        flipped = bytearray(path.read_bytes())
        flipped[-3] ^= 1
        path.write_bytes(flipped)
    with pytest.raises(AdapterLoadError, match="does not match the sha256"):
        open_source(store).fetch(digest)


async def test_a_manifest_that_names_another_place_is_never_followed(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    source = tmp_path / "upload"
    digest = await put(store, source, adapter_files())
    manifest = tmp_path / "store" / "manifests" / f"{digest}.json"
    files = json.loads(manifest.read_text())["files"]
    manifest.write_text(json.dumps({"files": {f"../{name}": file for name, file in files.items()}}))
    with pytest.raises(AdapterLoadError, match="does not match"):
        open_source(store).fetch(digest)


@pytest.mark.parametrize("name", ["../../etc", "", "ab" * 31, "AB" * 32, "ab" * 32 + "\n"])
async def test_only_a_digest_is_fetched(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterLoadError, match="not the digest"):
        open_source(create_store(tmp_path)).fetch(name)


@pytest.mark.parametrize("fault", ["flip", "add", "remove", "link"])
async def test_the_cache_is_checked_at_every_fetch(tmp_path: Path, fault: str) -> None:
    store, files = create_store(tmp_path), adapter_files()
    source = open_source(store)
    folder = source.fetch(await put(store, tmp_path / "upload", files))
    config = folder / "adapter_config.json"
    if fault == "flip":
        config.write_bytes(config.read_bytes().replace(b"8", b"9"))
    elif fault == "add":
        (folder / "adapter_model-00001-of-00001.safetensors").write_bytes(b"")
    else:
        config.unlink()
    if fault == "link":
        config.symlink_to(tmp_path / "upload" / "adapter_config.json")
    assert {path.name: path.read_bytes() for path in source.fetch(folder.name).iterdir()} == files


async def test_a_cached_version_needs_no_store(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    digest = await put(store, tmp_path / "upload", adapter_files())
    source = open_source(store)
    source.fetch(digest)
    shutil.rmtree(tmp_path / "store")
    assert source.fetch(digest).name == digest


async def test_the_cache_keeps_to_its_bound_and_to_what_is_being_read(tmp_path: Path) -> None:
    store = create_store(tmp_path, max_cache_bytes=1)
    digests = [await put(store, tmp_path / f"upload{seed}", adapter_files(seed=seed)) for seed in range(20)]
    source = open_source(store)
    folders = [source.fetch(digest) for digest in digests]
    assert [folder.exists() for folder in folders] == [False] * 4 + [True] * 16, "the last 16 may still be read"


async def test_concurrent_fetches_of_one_version_agree(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    digest = await put(store, tmp_path / "upload", adapter_files())
    source = open_source(store)
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(source.fetch(digest))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / "cache" / digest] * 8
    assert folder_digest(folders[0]) == digest


async def test_a_restart_removes_what_was_half_fetched(tmp_path: Path) -> None:
    half = tmp_path / "cache" / "tmp-x"
    half.mkdir(parents=True)
    (half / "adapter_model.safetensors").write_bytes(b"half")
    open_source(create_store(tmp_path))
    assert not half.exists()


async def test_deleting_a_version_removes_its_cached_copy(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    digest = await put(store, tmp_path / "upload", adapter_files())
    folder = open_source(store).fetch(digest)
    await store.delete_version(digest)
    assert not folder.exists()
    assert not await store.has_version(digest)


async def test_a_store_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    store = create_store(tmp_path)
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_bytes(b"in the way")
    with pytest.raises(StorageError, match="cannot write now"):
        await put(store, tmp_path / "upload", adapter_files())


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "store", "file://host/x", "s3://", "s3://bucket?colour=red", "s3:///prefix"]
)
async def test_a_url_that_names_no_store_is_refused_with_those_that_do(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match="s3://ACCESS_KEY"):
        ArtifactStore(url, cache_dir=tmp_path)
