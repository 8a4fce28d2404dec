"""CA-06, SC-07, OP-02, AP-03: what others do, break or abandon changes nobody's answer and leaves nothing behind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.bad_uploads import bad_uploads
from tests.e2e.server import Server, events, wait_until
from tests.helpers import make_adapter

PROMPT = [(i * 11 + 5) % 250 for i in range(70)]  # no other test of this server has it
NUM_CACHED = 64  # whole blocks of it
BAD = ("foreign_prefix", "config_rank_lies", "half_the_width", "nan", "pickle_named_safetensors")
ADAPTERS = "/api/v1/tenants/acme/adapters"


def num_cached(client: httpx.Client, **fields: Any) -> int:
    reply = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1, **fields}).raise_for_status()
    cached: int = reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def stream_token_ids(client: httpx.Client, lora: str | None) -> list[int]:
    body = {"prompt": PROMPT[:9], "max_tokens": 60, "temperature": 0, "ignore_eos": True, "lora": lora}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as response:
        choices = [choice for event in events(response) for choice in event["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [token_id for choice in choices for token_id in choice["token_ids"]]


def lose_files(server: Server, version: dict[str, Any]) -> None:
    """Remove a version's files from the store and from the engine's cache."""
    names = {version["digest"], f"{version['digest']}.json", *(file["sha256"] for file in version["files"])}
    found = [path for path in server.data_dir.rglob("*") if path.name in names]
    assert len(found) >= 3
    for path in found:
        if path.is_file():
            path.unlink()
        else:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()


def test_a_prefix_is_shared_within_a_tenant_only_whatever_salt_a_body_names(
    server: Server, tenant: httpx.Client, adapter_folders: dict[str, Path]
) -> None:
    with server.create_tenant("salt-rival") as rival:
        server.upload("salt-rival", "a7", adapter_folders["a7"])  # the same bytes under the same name
        for lora in (None, "a7"):
            assert num_cached(tenant, lora=lora, cache_salt="shared") == 0
            assert num_cached(rival, lora=lora, cache_salt="shared") == 0
            assert num_cached(tenant, lora=lora) == num_cached(rival, lora=lora) == NUM_CACHED
    server.api.delete("/api/v1/tenants/salt-rival?confirm=salt-rival").raise_for_status()


def test_bad_uploads_and_lost_files_fail_alone_among_twenty_streams(
    server: Server, tenant: httpx.Client, model: Path, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    quiet = {lora: stream_token_ids(tenant, lora) for lora in (None, "a7")}
    lost = server.upload("acme", "lost", make_adapter(tmp_path / "lost", model, seed=99))
    lose_files(server, lost)
    uploads = bad_uploads(adapter_folders["a3"])
    with ThreadPoolExecutor(20) as pool:
        loras = [None, "a7"] * 10
        streams = [pool.submit(stream_token_ids, tenant, lora) for lora in loras]
        for name in BAD:
            files = [("files", item) for item in uploads[name][1].items()]
            assert server.api.post(f"{ADAPTERS}/bad/versions", files=files).status_code == 422
            assert tenant.post("/v1/completions", json={"prompt": "x", "lora": "bad"}).status_code == 404
            for stream in (False, True):
                reply = tenant.post("/v1/completions", json={"prompt": "x", "lora": "lost", "stream": stream})
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "adapter_load_failed")
                assert "missing from the store" in reply.json()["error"]["message"]
        for lora, stream_result in zip(loras, streams, strict=True):
            assert stream_result.result(timeout=120) == quiet[lora]
    server.api.delete(f"{ADAPTERS}/lost").raise_for_status()
    server.wait_idle()


def leave(client: httpx.Client, lora: str, *, num_tokens: int, stays: bool) -> None:
    """Ask for 40 tokens in a stream, and close the connection when `num_tokens` of them have come."""
    body = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True, "lora": lora}
    with client.stream("POST", "/v1/completions", json=body) as response:
        seen = []
        for event in events(response):
            seen.append(event)
            if not stays and len(seen) > num_tokens:
                return
    assert seen[-1]["choices"][0]["finish_reason"] == "length"


def give_up(client: httpx.Client, lora: str) -> None:
    """Close the connection before anything came: in the queue, or while the prompt is computed."""
    body = {"prompt": PROMPT * 6, "max_tokens": 40, "ignore_eos": True, "lora": lora}
    try:
        client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.02))
    except httpx.ReadTimeout:
        return
    raise AssertionError("it was answered at once")


def test_thirty_requests_of_which_thirteen_leave_at_any_moment_keep_no_lease(
    server: Server, tenant: httpx.Client
) -> None:
    with ThreadPoolExecutor(30) as pool:
        jobs = []
        for index in range(30):
            lora = f"a{index % 10}"  # 31 slots in all, of 16
            if index % 5 == 1:
                jobs.append(pool.submit(give_up, tenant, lora))
            else:
                at = (0, 3, 39)[index % 3]
                jobs.append(pool.submit(leave, tenant, lora, num_tokens=at, stays=index % 4 != 0))
        for job in jobs:
            job.result(timeout=120)
    server.wait_idle()
    for index in range(10):
        assert tenant.post(f"{ADAPTERS}/a{index}/versions/1/unload").status_code == 204
    wait_until(lambda: server.api.get("/api/v1/engine").json()["stats"]["resident"] == [], "unloaded")
