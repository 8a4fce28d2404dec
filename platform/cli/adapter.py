"""`loraplex adapter`: upload, list, move and delete adapters through a server's API."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from loraplex.adapters.file_names import CONFIG_FILE, check_file_name, is_inspected_file, is_version_file
from loraplex.adapters.folder import adapter_root
from loraplex.platform.adapters.naming import parse_adapter_name
from loraplex.platform.errors import NotFoundError

app = typer.Typer(name="adapter", help="Upload, list and move adapters through a server's API.", no_args_is_help=True)

TIMEOUT = httpx.Timeout(30.0, read=900.0)  # seconds; a big upload is checked before the server answers

Tenant = Annotated[str, typer.Option("--tenant", "-t", help="The tenant that owns the adapter.")]
Url = Annotated[str, typer.Option(help="The server.", envvar="LORAPLEX_URL")]
Key = Annotated[
    str, typer.Option(help="API key; rather set the variable, where `ps` does not show it.", envvar="LORAPLEX_API_KEY")
]
DEFAULT_URL = "http://127.0.0.1:8000"

_CHUNK_BYTES = 1 << 16


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", exists=True, help="A PEFT adapter's folder, or a zip.")],
    tenant: Tenant,
    name: Annotated[str, typer.Option(help="The adapter's name; made if it does not exist.")],
    key: Key,
    url: Url = DEFAULT_URL,
) -> None:
    """Upload the next version of an adapter. Prints NAME@VERSION, or every reason why the server refuses it.

    Only what belongs to the adapter is sent: its config, its safetensors, and tokenizer files to check the vocabulary.
    """
    with _client(url, key) as client, ExitStack() as opened:
        progress = opened.enter_context(_progress())
        url_path = f"{_adapter_path(tenant, name)}/versions"
        if folder.is_file():
            body = opened.enter_context(_Reported(folder, progress))
            reply = client.post(url_path, content=_chunks(body), headers={"content-type": "application/zip"})
        else:
            files = [(path.name, opened.enter_context(_Reported(path, progress))) for path in _files_to_send(folder)]
            reply = client.post(url_path, files=[("files", file) for file in files])
    version = _checked(reply)
    for warning in version["facts"]["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(f"{name}@{version['version']}")


@app.command("list")
def list_adapters(tenant: Tenant, key: Key, url: Url = DEFAULT_URL) -> None:
    """Print name, versions and aliases of every adapter, separated by tabs."""
    with _client(url, key) as client:
        for adapter in _pages(client, f"/api/v1/tenants/{tenant}/adapters"):
            aliases = ", ".join(f"{alias}={version}" for alias, version in sorted(adapter["aliases"].items()))
            typer.echo(f"{adapter['name']}\t{', '.join(map(str, adapter['versions']))}\t{aliases}")


@app.command()
def alias(
    name: Annotated[str, typer.Argument(help="The adapter's name.")],
    alias: Annotated[str, typer.Argument(help="The alias; `default` is what the bare name means.")],
    version: Annotated[int, typer.Argument(help="The version that it points to from now on.")],
    tenant: Tenant,
    key: Key,
    url: Url = DEFAULT_URL,
) -> None:
    """Point an alias to a version; requests that are running stay where they are."""
    with _client(url, key) as client:
        _checked(client.put(f"{_adapter_path(tenant, name)}/aliases/{alias}", json={"version": version}))
    typer.echo(f"{name}@{alias} -> {name}@{version}")


@app.command()
def delete(
    name: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="An adapter, or one of its versions.")],
    tenant: Tenant,
    key: Key,
    url: Url = DEFAULT_URL,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete an adapter with all its versions, or one version. Requests that are running finish."""
    adapter, version = _name_and_version(name)
    if not yes:
        typer.confirm(f"Delete {name} of tenant {tenant}, weights included?", abort=True)
    path = _adapter_path(tenant, adapter)
    with _client(url, key) as client:
        _checked(client.delete(path if version is None else f"{path}/versions/{version}"))
    typer.echo(f"deleted {name}")


class _Reported(io.FileIO):
    """A file whose reading shows as progress."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path, "rb")
        self._progress = progress
        self._task = progress.add_task(path.name, total=path.stat().st_size)

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size) or b""
        self._progress.advance(self._task, len(chunk))
        return chunk


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


def _files_to_send(folder: Path) -> list[Path]:
    root = adapter_root(folder)
    files = sorted(path for path in root.iterdir() if is_version_file(path.name) or is_inspected_file(path.name))
    if CONFIG_FILE not in {path.name for path in files}:
        _fail(f"{folder} has no {CONFIG_FILE}: give the folder that PEFT's save_pretrained wrote")
    pickles = [path.name for path in root.iterdir() if path.suffix == ".bin" and path.name.startswith("adapter_model")]
    if pickles and not any(path.suffix == ".safetensors" for path in files):
        reason = check_file_name(pickles[0])
        _fail(f"{reason.message}\n  {reason.remedy}" if reason else pickles[0])
    return files


def _name_and_version(name: str) -> tuple[str, int | None]:
    try:
        requested = parse_adapter_name(name)
    except NotFoundError as error:
        _fail(error.message)
    if requested.alias is not None:
        _fail(f"{name} is an alias; name the version that is to be deleted")
    return requested.name, requested.version


def _adapter_path(tenant: str, name: str) -> str:
    return f"/api/v1/tenants/{tenant}/adapters/{name}"


def _pages(client: httpx.Client, path: str) -> Iterator[dict[str, Any]]:
    after: str | None = None
    while True:
        page = _checked(client.get(path, params={} if after is None else {"after": after}))
        yield from page["data"]
        if not page["has_more"]:
            return
        after = page["data"][-1]["name"]


@contextmanager
def _client(url: str, key: str) -> Iterator[httpx.Client]:
    try:
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=TIMEOUT) as client:
            yield client
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        _fail(f"{url} does not answer: {error}")


def _checked(reply: httpx.Response) -> Any:
    """The reply's JSON; an error becomes readable lines and exit status 1."""
    if reply.is_success:
        return reply.json() if reply.content else None
    try:
        error = reply.json()["error"]
    except (ValueError, KeyError, TypeError):
        _fail(f"the server answered {reply.status_code}")
    reasons = error.get("reasons")
    if not reasons:
        _fail(f"{error['message']} ({reply.status_code})")
    lines = [f"the server refuses the adapter, for {len(reasons)} reason{'s' if len(reasons) > 1 else ''}:"]
    for reason in reasons:
        lines.append(f"  - {reason['message']}")
        if reason.get("remedy"):
            lines.append(f"    {reason['remedy']}")
    _fail("\n".join(lines))


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
