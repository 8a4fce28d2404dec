"""AP-08, AP-09, AP-11, AP-12, AP-17, AP-18, TE-01: what a name means, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.server import SERVED_NAME, Server, events


@pytest.fixture(scope="module")
def rival(server: Server, tenant: httpx.Client) -> Iterator[httpx.Client]:
    """Another tenant, without adapters."""
    with server.create_tenant("rival") as client:
        yield client


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 8, "temperature": 0, **fields})


def text(client: httpx.Client, **fields: Any) -> str:
    said: str = complete(client, **fields).raise_for_status().json()["choices"][0]["text"]
    return said


@pytest.mark.parametrize("lora", ["nope", "", " ", "a7 ", "A7", "a7@99", "a7@nope", "../../etc", "/etc", "a\0"])
def test_unknown_adapter_is_404_with_a_stable_code_and_never_the_base(tenant: httpx.Client, lora: str) -> None:
    replies = [complete(tenant, lora=lora), complete(tenant, lora=[lora]), complete(tenant, model=lora)]
    if "@" not in lora:
        replies += [complete(tenant, lora={"name": lora}), complete(tenant, lora={"name": lora, "version": 1})]
    replies.append(complete(tenant, lora={"name": "a7", "version": 99}))
    assert {(reply.status_code, reply.json()["error"]["code"]) for reply in replies} == {(404, "not_found")}


def test_null_is_the_base(tenant: httpx.Client) -> None:
    assert text(tenant, lora=None) == text(tenant) == text(tenant, model=SERVED_NAME)


def test_an_adapter_cannot_take_the_bases_name(server: Server, tenant: httpx.Client) -> None:
    reply = server.api.post(f"/api/v1/tenants/acme/adapters/{SERVED_NAME}/versions", files=[("files", ("x", b""))])
    assert reply.status_code == 400
    assert SERVED_NAME in reply.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_every_reply_and_every_chunk_names_the_adapter_its_version_and_its_digest(
    tenant: httpx.Client, route: str
) -> None:
    body: dict[str, Any] = {"model": "a7@1", "max_tokens": 4}
    body |= {"prompt": "hello"} if route == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    digest = tenant.get("/api/v1/tenants/acme/adapters/a7/versions/1").json()["digest"]
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    with tenant.stream("POST", route, json=streamed) as response:
        said = [(event["model"], event["lora"]) for event in events(response)]
    whole = tenant.post(route, json=body).json()
    said.append((whole["model"], whole["lora"]))
    assert len(said) > 3
    assert all(one == ("a7@1", {"name": "a7", "version": 1, "digest": digest, "weight": 1.0}) for one in said)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_fails_names_the_adapter_too(tenant: httpx.Client, stream: bool) -> None:
    mix = ["a9", "a8", "a7", "a6", "a5"]  # never fits
    reply = complete(tenant, lora=mix, stream=stream)
    assert reply.status_code == 400
    assert [part["name"] for part in reply.json()["lora"]] == mix
    assert all(len(part["digest"]) == 64 for part in reply.json()["lora"])


def test_the_log_names_the_adapter_its_version_and_its_digest(server: Server, tenant: httpx.Client) -> None:
    digest = tenant.get("/api/v1/tenants/acme/adapters/a7/versions/1").json()["digest"]
    request_id = complete(tenant, lora="a7").headers["x-request-id"]
    line = next(line for line in server.log.splitlines() if request_id in line)
    assert f"a7@1 ({digest[:12]})" in line
    request_id = complete(tenant, lora=[{"name": "a7", "weight": 0.5}, "a3"]).headers["x-request-id"]
    line = next(line for line in server.log.splitlines() if request_id in line)
    assert f"0.5*a7@1 ({digest[:12]}) + 1*a3@1 (" in line


def test_other_tenants_see_and_get_nothing_and_are_told_nothing(tenant: httpx.Client, rival: httpx.Client) -> None:
    digest = tenant.get("/api/v1/tenants/acme/adapters/a7/versions/1").json()["digest"]
    assert [model["id"] for model in rival.get("/v1/models").json()["data"]] == [SERVED_NAME]
    for lora in ("a7", "a7@1", "a7@default", "a7@latest"):
        foreign, unknown = complete(rival, lora=lora), complete(rival, lora=lora.replace("a7", "z7"))
        assert foreign.status_code == unknown.status_code == 404
        assert foreign.json() == unknown.json() | {
            "error": {**unknown.json()["error"], "message": foreign.json()["error"]["message"]}
        }
        assert foreign.json()["error"]["message"].replace("a7", "z7") == unknown.json()["error"]["message"]
    assert complete(rival, lora=digest).status_code == 404
    assert rival.get("/v1/models/a7").status_code == 404
    assert rival.post("/tenants/acme/v1/completions", json={"prompt": "x"}).status_code == 404


def test_weight_zero_is_the_base_one_is_the_adapter_and_others_differ(tenant: httpx.Client) -> None:
    def weighted(weight: float) -> str:
        return text(tenant, lora={"name": "a7", "weight": weight})

    assert weighted(0) == text(tenant)
    assert weighted(1) == text(tenant, lora="a7")
    assert len({weighted(weight) for weight in (0, 1, -1, 10)}) == 4


@pytest.mark.parametrize("weight", ["NaN", "Infinity", "1e9", "-10.5"])
def test_weight_that_is_no_sensible_number_is_refused(tenant: httpx.Client, weight: str) -> None:
    raw = f'{{"prompt": "x", "lora": {{"name": "a7", "weight": {weight}}}}}'
    reply = tenant.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")


def test_mix_takes_eight_parts_without_repeats(tenant: httpx.Client) -> None:
    assert complete(tenant, lora=[f"a{index}" for index in range(9)]).status_code == 400
    assert complete(tenant, lora=["a0", "a0@1"]).status_code == 400
    assert complete(tenant, lora=[f"a{index}" for index in range(3)]).status_code == 200


def test_mix_that_can_never_fit_is_refused_with_both_numbers(tenant: httpx.Client) -> None:
    reply = complete(tenant, lora=["a9", "a8", "a7", "a6", "a5"])  # 8 + 4 + 3 + 2 + 2 slots of 16
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "adapter_never_fits")
    assert "19" in reply.json()["error"]["message"]
    assert "16" in reply.json()["error"]["message"]


def test_upload_moves_no_traffic_until_the_alias_is_moved(
    server: Server, tenant: httpx.Client, adapter_folders: dict[str, Any]
) -> None:
    server.upload("acme", "moving", adapter_folders["a6"])
    before = text(tenant, lora="moving")
    assert server.upload("acme", "moving", adapter_folders["a7"])["version"] == 2
    assert text(tenant, lora="moving") == before == text(tenant, lora="a6")
    assert text(tenant, lora="moving@latest") == text(tenant, lora="a7") != before
    server.api.put("/api/v1/tenants/acme/adapters/moving/aliases/default", json={"version": 2}).raise_for_status()
    assert text(tenant, lora="moving") == text(tenant, lora="a7")
    server.api.delete("/api/v1/tenants/acme/adapters/moving").raise_for_status()
