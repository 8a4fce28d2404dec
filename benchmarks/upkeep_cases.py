"""What a server costs that loads, refuses, is abandoned and goes on for long: what is behind the counts of the tests.

On a small random base, where the model itself costs next to nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path

import httpx
import psutil

from benchmarks.case import Case
from tests.acceptance.bad_uploads import bad_uploads
from tests.e2e.server import Server, events, is_clean, running_server
from tests.helpers import make_adapter, make_checkpoint

TENANT = "cases"
PROMPT = [(i * 7 + 3) % 120 + 3 for i in range(70)]
HEADER_CASES = ("truncated_body", "header_overflow", "header_not_json", "empty_file", "pickle_named_safetensors")


def upkeep_cases(root: Path) -> Iterator[Case]:
    """All of them, on one server with a small random base and ten adapters."""
    base = make_checkpoint(root / "base", vocab_size=512, max_position_embeddings=1024)
    adapters = [make_adapter(root / f"a{i}", base, seed=i, r=8 * (1 + i % 8)) for i in range(10)]
    flags = ("--skip-tokenizer-init", "--adapter-slots", "16", "--kv-cache-memory-gib", "0.1")
    with running_server(base, root / "data", *flags) as server:
        client = server.create_tenant(TENANT)
        for index, folder in enumerate(adapters):
            server.upload(TENANT, f"a{index}", folder)
        yield refused_headers(server, client, adapters[0])
        yield from gap_while_loading(client, adapters)
        yield leases_after_abort(server, client)
        yield from memory_over_reloads(server, client, len(adapters))


def refused_headers(server: Server, client: httpx.Client, good: Path) -> Case:
    """Milliseconds and bytes that a malformed header costs."""
    cases = bad_uploads(good)
    before = rss(server.process.pid)
    seconds = []
    for name in HEADER_CASES:
        files = [("files", item) for item in cases[name][1].items()]
        started = time.monotonic()
        reply = client.post(f"/api/v1/tenants/{TENANT}/adapters/bad/versions", files=files)
        seconds.append(time.monotonic() - started)
        assert reply.status_code == 422, reply.text
    growth = (rss(server.process.pid) - before) / 2**20
    return Case("malformed safetensors headers", f"worst {max(seconds) * 1000:.0f} ms, server grew by {growth:.1f} MiB")


def gap_while_loading(client: httpx.Client, adapters: list[Path]) -> Iterator[Case]:
    """Longest gap between two tokens of a stream, quiet and while adapters are loaded and evicted all the time."""
    quiet = gaps(client)
    with repeated(lambda i: set_residency(client, i % len(adapters), "load")):
        busy = gaps(client)
    for name, values in (("quiet", quiet), ("adapters loading", busy)):
        p99 = statistics.quantiles(values, n=100)[98] * 1000
        yield Case(f"gap between tokens, {name}", f"median {statistics.median(values) * 1000:.1f} ms, "
               f"P99 {p99:.1f} ms, longest {max(values) * 1000:.1f} ms")  # fmt: skip
    unload_all(client, len(adapters))


def gaps(client: httpx.Client) -> list[float]:
    body = {"prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    body["return_token_ids"] = True  # without a tokenizer a token has no text, and nothing else to send
    times = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        for _ in events(response):
            times.append(time.monotonic())
    return [after - before for before, after in pairwise(times)]


def leases_after_abort(server: Server, client: httpx.Client) -> Case:
    """Seconds until nothing is held any more after 30 clients close their connections at once."""
    body = {"prompt": PROMPT, "max_tokens": 500, "ignore_eos": True, "stream": True}
    streams = [client.stream("POST", "/v1/completions", json=body | {"lora": f"a{i % 10}"}) for i in range(30)]
    threads = [threading.Thread(target=open_and_close, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    started = time.monotonic()
    while not is_clean(server.integrity()):
        time.sleep(0.005)
    return Case("blocks, slots and leases of 30 closed streams", f"free after {time.monotonic() - started:.2f} s")


def open_and_close(stream: AbstractContextManager[httpx.Response]) -> None:
    with stream:
        time.sleep(0.2)


def memory_over_reloads(server: Server, client: httpx.Client, num_adapters: int) -> Iterator[Case]:
    """Resident memory over 300 cycles of load, use, unload."""
    sizes = {}
    for cycle in range(1, 301):
        index = cycle % num_adapters
        set_residency(client, index, "load")
        body = {"prompt": PROMPT, "max_tokens": 2, "lora": f"a{index}"}
        client.post("/v1/completions", json=body).raise_for_status()
        set_residency(client, index, "unload")
        if cycle in (50, 300):
            sizes[cycle] = (rss(server.engine.pid), rss(server.process.pid))
    for name, place in (("engine", 0), ("server", 1)):
        first, last = sizes[50][place] / 2**20, sizes[300][place] / 2**20
        yield Case(
            f"memory of the {name} over reloads",
            f"{first:.1f} MiB at cycle 50, {last:.1f} MiB at 300 ({last / first - 1:+.1%})",
        )


def set_residency(client: httpx.Client, index: int, action: str) -> None:
    client.post(f"/api/v1/tenants/{TENANT}/adapters/a{index}/versions/1/{action}", timeout=60)


def unload_all(client: httpx.Client, num_adapters: int) -> None:
    for index in range(num_adapters):
        set_residency(client, index, "unload")


@contextmanager
def repeated(action: Callable[[int], None]) -> Iterator[None]:
    """Do it over and over on a thread while the block runs."""
    stop = threading.Event()

    def run() -> None:
        number = 0
        while not stop.is_set():
            action(number)
            number += 1

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def rss(pid: int) -> int:
    size: int = psutil.Process(pid).memory_info().rss
    return size
