"""Opens the store that a URL names, the same in the server and in the engine process.

    file:///FOLDER                                                  a folder of this machine
    s3://ACCESS_KEY:SECRET@BUCKET/PREFIX?region=R&endpoint=URL      S3 or compatible; key and secret URL-encoded

Everything that opens the store stands in its URL, since the engine process has no secrets in its environment; without
a key in the URL the machine's own role is asked.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from urllib.request import url2pathname

from obstore.store import LocalStore, ObjectStore, S3Store

from loraplex.engine.errors import ConfigurationError

if TYPE_CHECKING:
    from obstore.store import S3Config  # exists for type checkers only

BLOBS = "blobs"
MANIFESTS = "manifests"

_S3_SETTINGS = ("region", "endpoint")


def open_object_store(url: str) -> ObjectStore:
    """Raises ConfigurationError when the URL names no store. Touches the network no earlier than the first call."""
    scheme = urlsplit(url).scheme
    if scheme == "file":
        return _open_local(url)
    if scheme == "s3":
        return _open_s3(url)
    raise _misnamed(f"its scheme is {scheme!r}")


def local_folder(url: str) -> Path | None:
    """The folder of a `file:` store, None for any other."""
    parts = urlsplit(url)
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None


def blob_path(sha256: str) -> str:
    return f"{BLOBS}/{sha256}"


def manifest_path(digest: str) -> str:
    return f"{MANIFESTS}/{digest}.json"


def _open_local(url: str) -> ObjectStore:
    folder = local_folder(url)
    if urlsplit(url).netloc or folder is None or not folder.is_absolute():
        raise _misnamed("its path is not absolute")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"store_url: {folder} cannot be made: {error.strerror}", param="store_url") from error
    return LocalStore(folder)


def _open_s3(url: str) -> ObjectStore:
    parts = urlsplit(url)
    settings = {name: values[-1] for name, values in parse_qs(parts.query, strict_parsing=bool(parts.query)).items()}
    unknown = sorted(settings.keys() - set(_S3_SETTINGS))
    if not parts.hostname or unknown:
        raise _misnamed(f"{unknown[0]!r} is no setting of it" if unknown else "it names no bucket")
    config: S3Config = {"region": settings.get("region", "us-east-1")}
    endpoint = settings.get("endpoint", "")
    if endpoint:
        config["endpoint"] = endpoint
    if parts.username:
        config["access_key_id"] = unquote(parts.username)
        config["secret_access_key"] = unquote(parts.password or "")
    return S3Store(
        parts.netloc.rpartition("@")[2],  # unlike `hostname` not lowered
        prefix=parts.path.strip("/") or None,
        config=config,
        client_options={
            "allow_http": endpoint.startswith("http://"),
            "connect_timeout": timedelta(seconds=5),
            "timeout": timedelta(minutes=10),  # of one request, body included
        },
        retry_config={"max_retries": 3, "retry_timeout": timedelta(seconds=20)},
    )


def _misnamed(fault: str) -> ConfigurationError:
    return ConfigurationError(
        f"store_url names no store: {fault}; use file:///FOLDER or "
        "s3://ACCESS_KEY:SECRET@BUCKET/PREFIX?region=REGION&endpoint=URL",
        param="store_url",
    )
