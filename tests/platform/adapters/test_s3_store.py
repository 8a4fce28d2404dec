"""The store on a real S3 server of this machine."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
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
STARTS, START_TRIES = 3, 300


def free_ports(count: int) -> list[int]:
    """Different ones: all are held until the last is found."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert WEED.exists(), "the S3 server of the dev extra is not installed; run `make setup-dev`"
    log_text = ""
    for _ in range(STARTS):  # somebody else may take a port in the moment before the server does
        folder = tmp_path_factory.mktemp("s3")
        command, url = server_command(folder)
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as server,
        ):
            try:
                if create_bucket(url, server):
                    yield url
                    return
            finally:
                server.kill()  # its orderly end takes half a minute
        log_text = (folder / "log").read_text()
    raise AssertionError(f"the S3 server did not start: {log_text[-2000:]}")


def server_command(folder: Path) -> tuple[list[str], str]:
    config = folder / "s3.json"
    identity = {
        "name": "test",
        "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config.write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    numbers = free_ports(2 * len(names))
    ports, grpc_ports = dict(zip(names, numbers, strict=False)), numbers[len(names) :]
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
        *(f"-{name}.port.grpc={port}" for name, port in zip(names, grpc_ports, strict=True)),
    ]
    return command, f"http://127.0.0.1:{ports['s3']}"


def create_bucket(url: str, server: subprocess.Popen[bytes]) -> bool:
    """Make the bucket as soon as the server takes it (an object store makes none); False if the server ends."""
    bucket = open_object_store(f"s3://{ACCESS_KEY}:{QUOTED_SECRET}@adapters/?endpoint={url}")
    for _ in range(START_TRIES):
        if server.poll() is not None:
            return False
        if not is_listening(url):  # the client would go on trying for minutes
            time.sleep(0.1)
            continue
        try:
            obstore.put(bucket, "probe", b"")
        except Exception:  # whatever it says while it starts
            time.sleep(0.1)
        else:
            obstore.delete(bucket, "probe")
            return True
    return False


def is_listening(url: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0


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
    store = ArtifactStore(store_url(f"http://127.0.0.1:{free_ports(1)[0]}"), cache_dir=tmp_path / "cache")
    with pytest.raises(AdapterLoadError, match="cannot be fetched"):
        open_source(store).fetch("ab" * 32)
    shutil.rmtree(tmp_path / "cache")
