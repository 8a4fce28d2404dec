"""`loraplex adapter`: upload, list, move and delete adapters through a server's API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

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


@app.command()
def push(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, help="A PEFT adapter's folder, or a zip of it.")
    ],
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
        path = f"{_adapter_path(tenant, name)}/versions"
        if folder.is_file():
            body = opened.enter_context(_Reported(folder, progress))
            reply = client.post(path, content=iter(body), headers={"content-type": "application/zip"})
        else:
            files = [opened.enter_context(_Reported(file, progress)) for file in _files_to_send(folder)]
            reply = client.post(path, files=[("files", (file.name, file)) for file in files])
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


class _Reported:
    """A file whose reading shows as progress."""

    def __init__(self, path: Path, progress: Progress) -> None:
        self.name = path.name
        self._path = path
        self._progress = progress
        self._file: BinaryIO
        self._task: TaskID

    def __enter__(self) -> _Reported:
        self._file = self._path.open("rb")
        self._task = self._progress.add_task(self.name, total=self._path.stat().st_size)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[bytes]:
        while chunk := self.read(1 << 16):
            yield chunk

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self._progress.advance(self._task, len(chunk))
        return chunk

    def fileno(self) -> int:
        """Where the client finds the length."""
        return self._file.fileno()


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
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
