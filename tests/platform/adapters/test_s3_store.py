"""The store on a real S3 server of this machine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from loraplex.adapters.errors import AdapterLoadError
from loraplex.platform.errors import StorageError
from loraplex.platform.storage.artifact_store import ArtifactStore
from loraplex.platform.storage.object_store import open_object_store
from tests.platform.adapters.helpers import adapter_files
from tests.platform.adapters.test_store import open_source, put

ACCESS_KEY, SECRET = "test-access", "a/secret+that needs%quoting"
QUOTED_SECRET = "a%2Fsecret%2Bthat%20needs%25quoting"
WEED = Path(sys.executable).with_name("weed")
START_TRIES = 600


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if not WEED.exists():
        pytest.skip("the S3 server of the dev extra is not installed on this machine")
    folder = tmp_path_factory.mktemp("s3")
    config = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [
        str(WEED),
        "server",
        f"-dir={folder}",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        "-filer",
        "-s3",
        f"-s3.config={config}",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=20",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *(f"-{name}.port.grpc={free_port()}" for name in ports),
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as server:
        try:
            url = f"http://127.0.0.1:{ports['s3']}"
            create_bucket(url)
            yield url
        finally:
            server.kill()  # its orderly end takes half a minute


def create_bucket(url: str) -> None:
    """Make the bucket as soon as the server takes it: an object store writes into buckets, it makes none."""
    bucket = open_object_store(f"s3://{ACCESS_KEY}:{QUOTED_SECRET}@adapters/?endpoint={url}")
    for _ in range(START_TRIES):
        try:
            obstore.put(bucket, "probe", b"")
        except Exception:  # whatever it says while it starts
            time.sleep(0.1)
        else:
            obstore.delete(bucket, "probe")
            return
    raise AssertionError("the S3 server did not start")


def store_url(endpoint: str, *, secret: str = QUOTED_SECRET) -> str:
    return f"s3://{ACCESS_KEY}:{secret}@adapters/some/prefix?endpoint={endpoint}"


async def test_versions_go_to_s3_and_come_back(endpoint: str, tmp_path: Path) -> None:
    store = ArtifactStore(store_url(endpoint), cache_dir=tmp_path / "cache")
    files = adapter_files() | {"adapter_model-00001-of-00001.safetensors": bytes(20 << 20)}
    digest = await put(store, tmp_path / "upload", files)
    await put(store, tmp_path / "upload", files)
    assert {path.name: path.read_bytes() for path in open_source(store).fetch(digest).iterdir()} == files
    await store.delete_version(digest)
    assert not await store.has_version(digest)
    with pytest.raises(AdapterLoadError, match="missing from the store"):
        open_source(store).fetch(digest)


async def test_objects_are_published_once_and_under_the_prefix(endpoint: str, tmp_path: Path) -> None:
    store = ArtifactStore(store_url(endpoint), cache_dir=tmp_path / "cache")
    digest = await put(store, tmp_path / "upload", adapter_files(seed=5))
    bucket = open_object_store(f"s3://{ACCESS_KEY}:{QUOTED_SECRET}@adapters/?endpoint={endpoint}")
    assert isinstance(bucket, S3Store)
    found = {meta["path"]: meta["e_tag"] for batch in obstore.list(bucket, "some/prefix") for meta in batch}
    assert f"some/prefix/manifests/{digest}.json" in found
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(bucket, f"some/prefix/manifests/{digest}.json", b"other", mode="create", use_multipart=False)


async def test_a_wrong_secret_is_refused_and_not_repeated(
    endpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = ArtifactStore(store_url(endpoint, secret="wrong-secret"), cache_dir=tmp_path / "cache")
    with pytest.raises(StorageError) as caught:
        await put(store, tmp_path / "upload", adapter_files())
    with pytest.raises(AdapterLoadError) as refused:
        open_source(store).fetch("ab" * 32)
    for text in (caught.value.message, refused.value.message, caplog.text):
        assert "wrong-secret" not in text


async def test_a_server_that_is_away_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = ArtifactStore(store_url(f"http://127.0.0.1:{free_port()}"), cache_dir=tmp_path / "cache")
    with pytest.raises(AdapterLoadError, match="cannot be fetched"):
        open_source(store).fetch("ab" * 32)
    shutil.rmtree(tmp_path / "cache")
