"""Processes that die, and processes that are asked to: nobody waits for ever, and nothing is left behind."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.server import Server, events, running_server, wait_until

NUM_STREAMS = 20
FLAGS = ("--adapter-slots", "16", "--max-num-seqs", "32", "--max-num-batched-tokens", "128")
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 450, "ignore_eos": True, "stream": True}


def read_stream(client: httpx.Client, started: threading.Semaphore, lora: str | None) -> list[dict[str, Any]]:
    with client.stream("POST", "/v1/completions", json=LONG | {"lora": lora}) as response:
        seen: list[dict[str, Any]] = []
        for event in events(response):
            if not seen:
                started.release()
            seen.append(event)
        return seen


def is_unready(server: Server) -> bool:
    try:
        return server.api.get("/readyz").status_code == 503
    except httpx.ConnectError:  # it gave up and is gone
        return True


def kill_engine_under_load(server: Server, client: httpx.Client) -> list[list[dict[str, Any]]]:
    """kill -9 while all streams run; what each of them got."""
    started = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        loras = [None if index % 2 else "a7" for index in range(NUM_STREAMS)]
        streams = [pool.submit(read_stream, client, started, lora) for lora in loras]
        for _ in range(NUM_STREAMS):
            started.acquire(timeout=60)
        server.engine.kill()
        wait_until(lambda: is_unready(server), "unready")
        return [stream.result(timeout=60) for stream in streams]


def test_engine_that_dies_tells_every_stream_and_comes_back_until_it_dies_too_often(
    model: Path, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    with running_server(model, tmp_path, *FLAGS, "--kv-cache-memory-gib", "0.05") as server:
        with server.create_tenant("acme") as client:
            server.upload("acme", "a7", adapter_folders["a7"])
            for seen in kill_engine_under_load(server, client):
                assert seen[-1]["error"]["code"] == "engine_dead"
                assert "choices" in seen[0]
            server.wait_ready()
            server.wait_idle()
            reply = client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "lora": "a7"})
            assert reply.status_code == 200
            server.engine.kill()
            wait_until(lambda: is_unready(server), "unready")
            server.wait_ready()
            last = kill_engine_under_load(server, client)
        assert server.wait() == 1
        assert "Traceback" not in server.log
        said = server.log.strip().splitlines()[-1]
        assert said.startswith("error: ")
        assert all(seen[0]["id"] in said for seen in last)


def test_sigterm_lets_what_runs_finish_and_turns_new_work_away(model: Path, tmp_path: Path) -> None:
    with running_server(model, tmp_path, *FLAGS, "--kv-cache-memory-gib", "0.05") as server:
        with server.create_tenant("acme") as client:
            engine = server.engine
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                stream = events(response)
                next(stream)
                server.process.send_signal(signal.SIGTERM)
                wait_until(lambda: httpx.get(f"{server.url}/readyz").text == "draining", "draining")
                refused = httpx.post(f"{server.url}/v1/completions", json=LONG, headers=client.headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
                assert httpx.get(f"{server.url}/livez").status_code == 200
                *_, last = stream
            assert last["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not engine.is_running()


def test_sigterm_ends_what_takes_too_long_and_says_so(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-cache-memory-gib", "0.05", "--shutdown-grace-s", "0")
    with running_server(model, tmp_path, *flags) as server:
        with server.create_tenant("acme") as client, client.stream("POST", "/v1/completions", json=LONG) as response:
            stream = events(response)
            next(stream)
            server.process.send_signal(signal.SIGTERM)
            *_, last = stream
            assert last["choices"][0]["finish_reason"] == "abort"
        assert server.wait() == 0


def test_engine_does_not_outlive_a_killed_server_and_its_leftovers_do_not_matter(model: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--kv-cache-memory-gib", "0.05")
    with running_server(model, tmp_path, *flags) as server:
        with server.create_tenant("acme"):
            engine = server.engine
        server.process.kill()
        server.wait()
        psutil.wait_procs([engine], timeout=30)
        assert not engine.is_running()
    with running_server(model, tmp_path, *flags) as server:
        assert server.api.get("/api/v1/tenants").json()["data"][0]["name"] == "acme"


def test_sigterm_while_starting_is_no_error(model: Path, tmp_path: Path) -> None:
    server = Server(model, tmp_path, *FLAGS)
    try:
        wait_until(lambda: (tmp_path / "loraplex.db").exists(), "starting")
        assert server.stop() == 0
        assert "Traceback" not in server.log
    finally:
        server.close()
