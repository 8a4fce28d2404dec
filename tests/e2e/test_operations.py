"""What operators see: probes, metrics, usage, integrity, and how a server starts and refuses to start."""

from __future__ import annotations

import socket
import sqlite3
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.e2e.server import ADMIN_KEY, COMMAND, Server, running_server, wait_until


def metric(server: Server, name: str) -> float:
    lines = server.api.get("/metrics").raise_for_status().text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def run_serve(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *flags], capture_output=True, text=True, timeout=60, check=False)


def test_probes_are_one_word_and_need_no_key(server: Server) -> None:
    for path, word in (("/livez", "live"), ("/readyz", "ready")):
        reply = httpx.get(server.url + path)
        assert (reply.status_code, reply.text) == (200, word)


def test_metrics_need_their_scope_and_count_what_happened(server: Server, tenant: httpx.Client) -> None:
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    assert tenant.get("/metrics").status_code == 403
    before = {name: metric(server, name) for name in ("loraplex_output_tokens_total", "loraplex_errors_total")}
    tenant.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5, "lora": "a7", "ignore_eos": True})
    tenant.post("/v1/completions", json={"prompt": "hello", "lora": "nope"})
    assert metric(server, "loraplex_output_tokens_total") == before["loraplex_output_tokens_total"] + 5
    assert metric(server, "loraplex_errors_total") == before["loraplex_errors_total"] + 1
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "loraplex_requests_waiting_for_adapter",
        "loraplex_time_to_first_token_seconds_count",
        "loraplex_inter_token_latency_seconds_count",
        "loraplex_adapter_evictions_total",
        "loraplex_requests_cancelled_total",
        "loraplex_engine_steps_replayed_total",
    ):
        assert metric(server, name) >= 0
    assert metric(server, "loraplex_adapter_slots") == 32
    assert metric(server, "loraplex_adapter_loads_total") > 0
    assert 'vllm:lora_requests_info{max_lora="16"' in server.api.get("/metrics").text


def test_every_request_leaves_one_usage_record(server: Server, tenant: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 5, "lora": "a7", "ignore_eos": True, "n": 2}
    request_id = tenant.post("/v1/completions", json=body).json()["id"]

    def rows() -> list[tuple[object, ...]]:
        with sqlite3.connect(server.data_dir / "loraplex.db") as database:
            found = database.execute(
                "select tenant, adapter, prompt_tokens, completion_tokens, finish_reason from usage_records "
                "where request_id = ?",
                (request_id,),
            ).fetchall()
        database.close()
        return found

    wait_until(rows, "written")
    assert rows() == [("acme", "a7@1", 2, 10, "length")]


def test_integrity_is_the_platform_admins(server: Server, tenant: httpx.Client) -> None:
    assert tenant.get("/api/v1/engine/integrity").status_code == 403
    assert server.integrity()["faults"] == []


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"\xff", 400), (b"[" * 100_000, 400), (b'"x"', 400), (b'{"prompt": "\\ud800"}', 400)],
)
def test_body_that_is_no_request_gets_the_error_shape(tenant: httpx.Client, body: bytes, status: int) -> None:
    reply = tenant.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_routes_have_the_error_shape_too(tenant: httpx.Client) -> None:
    for reply in (tenant.get("/v1/embeddings"), tenant.get("/v1/completions")):
        assert reply.status_code in (404, 405)
        assert reply.json()["error"]["message"]


def test_settings_that_cannot_work_are_one_line_and_status_2(model: Path, tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for flags, said in (
            (("--model", str(model), "--port", port), port),
            (("--model", str(tmp_path / "nowhere"), "--port", "0"), "nowhere"),
            (
                ("--model", str(model), "--port", "0", "--max-model-len", "512", "--kv-cache-memory-gib", "1e-5"),
                "--kv-cache-memory-gib",
            ),
        ):
            ended = run_serve(*data, *flags)
            last_line = ended.stderr.strip().splitlines()[-1]
            assert ended.returncode == 2, ended.stderr
            assert last_line.startswith("error: ")
            assert said in last_line
            assert "Traceback" not in ended.stderr


def test_server_without_a_tokenizer_serves_token_ids(tmp_path: Path, model: Path) -> None:
    with running_server(model, tmp_path, "--skip-tokenizer-init", "--kv-cache-memory-gib", "0.05") as server:
        with server.create_tenant("ids") as client:
            reply = client.post(
                "/v1/completions", json={"prompt": [5, 6], "max_tokens": 2, "logprobs": 1, "echo": True}
            )
            choice = reply.raise_for_status().json()["choices"][0]
            assert choice["text"] == ""
            assert choice["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]
            assert len(choice["logprobs"]["token_logprobs"]) == 4
            assert client.post("/v1/completions", json={"prompt": "hello"}).status_code == 400
            messages = [{"role": "user", "content": "hi"}]
            assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 400
            for fields in ({"prompt": [260]}, {"prompt": [-1]}, {"prompt": [1], "logit_bias": {"260": 1}}):
                assert client.post("/v1/completions", json=fields).status_code == 400
            assert client.post("/v1/completions", json={"prompt": [1], "stop": "x"}).status_code == 400
        assert server.stop() == 0
        assert ADMIN_KEY not in server.log
