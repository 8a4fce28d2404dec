"""Malformed uploads against a running server: each gets a 4xx that names the fault, and nothing of it stays.

    python -m tests.acceptance.refusals [FIXTURES]

FIXTURES holds `bad/<case>/` (an adapter's folder) or `bad/<case>.zip|.tar`, and `bad/manifest.json` (case -> what the
answer should say); `peft/bases/` may hold the base that they were made for (`tiny...`). Without it the cases are made
on the spot. Also sends endless uploads without a key, with a revoked key and over the byte cap. Exits 1 on any fault.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.acceptance.bad_uploads import write_fixtures
from tests.e2e.server import Server, running_server
from tests.helpers import make_adapter, make_checkpoint

TENANT = "check"
LOCK = "lock"  # says that the folder of uploads has a living owner
UPLOAD_CAP_MIB = 16
MAX_READ_BYTES = 1 << 20


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        fixtures = Path(arguments[0]) if arguments else make_fixtures(root / "fixtures")
        base = next(folder for folder in sorted((fixtures / "peft" / "bases").iterdir()) if "tiny" in folder.name)
        flags = ("--skip-tokenizer-init", "--max-upload-mib", str(UPLOAD_CAP_MIB), "--kv-cache-memory-gib", "0.1")
        with running_server(base, root / "data", *flags) as server:
            client = server.create_tenant(TENANT)
            faults = list(check_uploads(client, fixtures / "bad")) + list(check_endless_uploads(server))
            faults += check_nothing_left(server, client)
    say(f"{len(faults)} faults" + "".join(f"\n  {fault}" for fault in faults))
    return 1 if faults else 0


def check_uploads(client: httpx.Client, bad: Path) -> Iterator[str]:
    manifest: dict[str, Any] = json.loads((bad / "manifest.json").read_text())
    for path in sorted(bad.iterdir()):
        if path.name == "manifest.json":
            continue
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        parts = [("files", (file.name, file.read_bytes())) for file in files]
        reply = client.post(f"/api/v1/tenants/{TENANT}/adapters/x{path.name[:2]}/versions", files=parts)
        error = reply.json().get("error") or {}
        expected = manifest.get(path.name, manifest.get(path.stem, {})).get("expect", "")
        say(f"{path.name:30} {reply.status_code} {str(error.get('message'))[:130]}   (should say: {expected[:50]})")
        if not (400 <= reply.status_code < 500 and error.get("message") and error.get("code")):
            yield f"{path.name}: {reply.status_code} {reply.text[:200]}"


def check_endless_uploads(server: Server) -> Iterator[str]:
    """Each has to be answered while the client is still sending, long before it would end."""
    revoked = server.create_client(TENANT, "adapters:write")
    key_id = server.api.get(f"/api/v1/tenants/{TENANT}/keys").json()
    newest = max(key_id.get("data", key_id.get("keys", [])), key=lambda key: key["created_at"])
    server.api.delete(f"/api/v1/tenants/{TENANT}/keys/{newest['id']}").raise_for_status()
    writer = server.create_client(TENANT, "adapters:write")
    senders = {
        "no key": ("", 401, MAX_READ_BYTES),
        "revoked key": (revoked.headers["authorization"], 401, MAX_READ_BYTES),
        "over the byte cap": (writer.headers["authorization"], 413, (UPLOAD_CAP_MIB << 20) + MAX_READ_BYTES),
    }
    for name, (authorization, status, most) in senders.items():
        answer, num_sent = send_endlessly(server.url, authorization, most)
        say(f"endless upload, {name}: {answer} after {num_sent} bytes sent")
        if answer != status or num_sent > most:
            yield f"endless upload, {name}: {answer} after {num_sent} bytes, expected {status} within {most}"


def send_endlessly(url: str, authorization: str, most: int) -> tuple[int, int]:
    """Send a chunked zip until an answer comes (or `most` bytes are gone): (status, bytes sent)."""
    where = urlsplit(url)
    head = f"POST /api/v1/tenants/{TENANT}/adapters/endless/versions HTTP/1.1\r\nHost: {where.netloc}\r\n"
    head += "Content-Type: application/zip\r\nTransfer-Encoding: chunked\r\n"
    head += f"Authorization: {authorization}\r\n\r\n" if authorization else "\r\n"
    chunk = b"10000\r\n" + b"\0" * 0x10000 + b"\r\n"
    num_sent = 0
    with socket.create_connection((where.hostname or "", where.port or 80), timeout=60) as connection:
        connection.sendall(head.encode())
        while num_sent <= most and not select.select([connection], [], [], 0.02)[0]:
            connection.sendall(chunk)
            num_sent += 0x10000
        status_line = connection.recv(4096).split(b"\r\n")[0]
    return int(status_line.split()[1]), num_sent


def check_nothing_left(server: Server, client: httpx.Client) -> list[str]:
    faults = []
    adapters = client.get(f"/api/v1/tenants/{TENANT}/adapters").json()
    if adapters.get("data"):
        faults.append(f"adapters left in the registry: {adapters}")
    for folder in ("store/blobs", "store/manifests", "uploads"):
        left = [path for path in (server.data_dir / folder).rglob("*") if path.is_file() and path.name != LOCK]
        if left:
            faults.append(f"files left under {folder}: {left[:5]}")
    reply = client.post("/v1/completions", json={"model": "base", "prompt": [1, 2, 3], "max_tokens": 2})
    say(f"serves on: {reply.status_code}; registry and store are empty: {not faults}")
    if reply.status_code != 200:
        faults.append(f"does not serve on: {reply.text}")
    return faults


def make_fixtures(root: Path) -> Path:
    base = make_checkpoint(root / "peft" / "bases" / "tiny-llama")
    write_fixtures(root, make_adapter(root / "good", base))
    return root


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
