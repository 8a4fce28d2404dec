"""AP-19: the same fields on every route, and the same usage, streamed or not."""

from __future__ import annotations

import itertools
from typing import Any

import httpx
import pytest

from tests.e2e.server import events

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello hello"}]},
}


def gather(client: httpx.Client, route: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices as a whole reply would have them, put together from a stream's chunks, and the usage."""
    texts: dict[int, dict[str, Any]] = {}
    usage: dict[str, Any] = {}
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", route, json=asked) as response:
        assert response.headers["x-accel-buffering"] == "no"
        for event in events(response):
            usage = event["usage"] or usage
            for choice in event["choices"]:
                entry = texts.setdefault(choice["index"], {"text": "", "tokens": 0, "finish_reason": None})
                entry["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                entry["tokens"] += num_tokens(choice)
                entry["finish_reason"] = choice["finish_reason"] or entry["finish_reason"]
    return [texts[index] for index in sorted(texts)], usage


def num_tokens(choice: dict[str, Any]) -> int:
    logprobs = choice["logprobs"] or {}
    return len(logprobs.get("content") or logprobs.get("tokens") or [])


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"text": text, "tokens": num_tokens(choice), "finish_reason": choice["finish_reason"]}


def two_token_stop(client: httpx.Client, route: str, body: dict[str, Any]) -> str:
    """Two characters in the middle of what the model says: with this tokenizer, two tokens."""
    text: str = whole(client.post(route, json=body).json()["choices"][0])["text"]
    pairs = [text[index : index + 2] for index in range(3, len(text) - 2)]
    return next(pair for pair in pairs if "\ufffd" not in pair)


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("lora", [None, "a7"])
def test_streamed_and_whole_replies_are_equal(tenant: httpx.Client, route: str, lora: str | None) -> None:
    base = ROUTES[route] | {"lora": lora, "max_tokens": 24, "temperature": 0.8, "seed": 3}
    stop = two_token_stop(tenant, route, base)
    for n, with_logprobs, with_stop in itertools.product((1, 3), (False, True), (False, True)):
        body = base | {"n": n} | ({"stop": [stop]} if with_stop else {})
        if with_logprobs:
            body |= {"logprobs": 5} if "prompt" in body else {"logprobs": True, "top_logprobs": 5}
        reply = tenant.post(route, json=body).raise_for_status().json()
        choices, usage = gather(tenant, route, body)
        assert [whole(choice) for choice in reply["choices"]] == choices
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert usage[name] == reply["usage"][name]
        if with_logprobs:
            assert usage["completion_tokens"] == sum(choice["tokens"] for choice in choices)
        if with_stop:
            assert not any(stop in choice["text"] for choice in choices)
            assert choices[0]["finish_reason"] == "stop"


def test_prompt_counts_once_for_all_choices_and_cached_tokens_are_told(tenant: httpx.Client) -> None:
    body = {"prompt": [9, 8, 7, 6] * 20, "max_tokens": 1, "lora": "a7"}
    one = tenant.post("/v1/completions", json=body).json()["usage"]
    three = tenant.post("/v1/completions", json=body | {"n": 3}).json()["usage"]
    assert (one["prompt_tokens"], three["prompt_tokens"]) == (80, 80)
    assert three["completion_tokens"] == 3
    assert one["prompt_tokens_details"]["cached_tokens"] == 0
    assert three["prompt_tokens_details"]["cached_tokens"] >= 64
