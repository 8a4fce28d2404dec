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
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
Choices = list[dict[str, Any]]


def gather(
    client: httpx.Client, route: str, body: dict[str, Any], *, include_usage: bool
) -> tuple[Choices, dict[str, Any] | None]:
    """Choices as a whole reply would have them, put together from a stream's chunks, and the usage if it came."""
    said: dict[int, dict[str, Any]] = {}
    usages: list[dict[str, Any]] = []
    asked = body | {"stream": True} | ({"stream_options": {"include_usage": True}} if include_usage else {})
    with client.stream("POST", route, json=asked) as response:
        assert response.headers["x-accel-buffering"] == "no"
        for event in events(response):
            usages += [event["usage"]] if event.get("usage") else []
            for choice in event["choices"]:
                entry = said.setdefault(choice["index"], {"text": "", "logprobs": [], "finish_reason": None})
                entry["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
                entry["logprobs"] += logprobs_of(choice)
                entry["finish_reason"] = choice["finish_reason"] or entry["finish_reason"]
    assert len(usages) == include_usage
    return [said[index] for index in sorted(said)], usages[0] if usages else None


def logprobs_of(choice: dict[str, Any]) -> list[float]:
    logprobs = choice["logprobs"] or {}
    if "content" in logprobs:
        return [token["logprob"] for token in logprobs["content"]]
    return list(logprobs.get("token_logprobs", []))


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {"text": text, "logprobs": logprobs_of(choice), "finish_reason": choice["finish_reason"]}


def two_token_stop(text: str) -> str:
    """Two characters in the middle of a text, which with this tokenizer are two tokens (no merge makes them one)."""
    pairs = [text[index : index + 2] for index in range(3, len(text) - 2)]
    return next(pair for pair in pairs if "\ufffd" not in pair and pair not in ("he", "ll"))


def assert_equal(streamed: Choices, replied: Choices) -> None:
    for one, other in zip(streamed, replied, strict=True):
        assert one | {"logprobs": 0} == other | {"logprobs": 0}
        assert one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-4)  # the prompt was cached for one of them


@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize("lora", [None, "a7"])
def test_streamed_and_whole_replies_are_equal(tenant: httpx.Client, route: str, lora: str | None) -> None:
    base = ROUTES[route] | {"lora": lora, "max_tokens": 24, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    unstopped = [whole(choice)["text"] for choice in tenant.post(route, json=base | {"n": 3}).json()["choices"]]
    stop = two_token_stop(unstopped[0])
    for n, with_logprobs, with_stop in itertools.product((1, 3), (False, True), (False, True)):
        body = base | {"n": n} | ({"stop": [stop]} if with_stop else {})
        if with_logprobs:
            body |= {"logprobs": 5} if "prompt" in body else {"logprobs": True, "top_logprobs": 5}
        reply = tenant.post(route, json=body).raise_for_status().json()
        choices = [whole(choice) for choice in reply["choices"]]
        for include_usage in (False, True):
            streamed, usage = gather(tenant, route, body, include_usage=include_usage)
            assert_equal(streamed, choices)
            if usage is not None:
                assert all(usage[name] == reply["usage"][name] for name in COUNTS)
        if with_logprobs:
            assert reply["usage"]["completion_tokens"] == sum(len(choice["logprobs"]) for choice in choices)
        for choice, text in zip(choices, unstopped[:n], strict=True):
            assert choice["text"] == (text.split(stop)[0] if with_stop else text)
            assert choice["finish_reason"] == ("stop" if with_stop and stop in text else "length")


def test_prompt_counts_once_for_all_choices_and_cached_tokens_are_told(tenant: httpx.Client) -> None:
    body = {"prompt": [9, 8, 7, 6] * 20, "max_tokens": 1, "lora": "a7"}
    one = tenant.post("/v1/completions", json=body).json()["usage"]
    three = tenant.post("/v1/completions", json=body | {"n": 3}).json()["usage"]
    assert (one["prompt_tokens"], three["prompt_tokens"]) == (80, 80)
    assert three["completion_tokens"] == 3
    assert one["prompt_tokens_details"]["cached_tokens"] == 0
    assert three["prompt_tokens_details"]["cached_tokens"] >= 64
