"""The official client against a running server: what works with OpenAI works here, and names its adapter besides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.server import ADMIN_KEY, Server

QUESTION: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Server, tenant: httpx.Client) -> Iterator[openai.OpenAI]:
    key = tenant.headers["authorization"].removeprefix("Bearer ")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as made:
        yield made


def test_chat_answers_with_usage_and_the_base_names_no_adapter(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="base", messages=QUESTION, max_completion_tokens=5, temperature=0)
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 5
    assert (reply.model, reply.model_extra) == ("base", {"lora": None})
    assert reply.id == reply._request_id


def test_lora_in_the_extra_body_changes_the_answer_and_is_named(client: openai.OpenAI) -> None:
    def ask(**lora: Any) -> Any:
        return client.chat.completions.create(
            model="base", messages=QUESTION, max_tokens=8, temperature=0, extra_body=lora
        )

    base, adapted, addressed = ask(), ask(lora="a7"), ask(lora={"name": "a7", "version": 1, "weight": 1.0})
    assert adapted.choices[0].message.content != base.choices[0].message.content
    assert addressed.choices[0].message.content == adapted.choices[0].message.content
    assert adapted.lora == addressed.lora
    assert (adapted.lora["name"], adapted.lora["version"], adapted.lora["weight"]) == ("a7", 1, 1.0)
    assert len(adapted.lora["digest"]) == 64
    mixed = ask(lora=[{"name": "a7", "weight": 0.7}, "a3"])
    assert [part["name"] for part in mixed.lora] == ["a7", "a3"]


def test_adapter_as_model_is_the_same_as_in_lora(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model=model, prompt="hello", max_tokens=8, temperature=0).choices[0].text
        for model in ("a7", "a7@1", "a7@latest", "base:a7", "base:a7@default")
    }
    assert len(texts) == 1


def test_stream_says_the_same_as_the_whole_reply_and_names_the_adapter_in_every_chunk(client: openai.OpenAI) -> None:
    asked: Any = {"model": "a7", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert {chunk.model for chunk in chunks} == {"a7"}
    assert all(chunk.model_extra and chunk.model_extra["lora"]["name"] == "a7" for chunk in chunks)


def test_chat_logprobs_have_openais_shape(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="base", messages=QUESTION, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob <= 0  # greedy
        assert token.bytes is not None
        assert bytes(token.bytes).decode(errors="replace") == token.token


def test_completion_logprobs_echo_and_offsets_belong_together(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="a7", prompt="hello", max_tokens=3, temperature=0, echo=True, logprobs=2)
    choice, usage = reply.choices[0], reply.usage
    assert usage is not None
    assert choice.text.startswith("hello")
    logprobs = choice.logprobs
    assert logprobs is not None
    tokens, offsets = logprobs.tokens or [], logprobs.text_offset or []
    assert len(tokens) == usage.prompt_tokens + 3
    assert (logprobs.token_logprobs or [0])[0] is None
    assert None not in (logprobs.token_logprobs or [])[1:]
    assert offsets == [len("".join(tokens[:index])) for index in range(len(tokens))]
    assert all(1 <= len(top) <= 3 for top in (logprobs.top_logprobs or [])[1:])  # equal texts share an entry


def test_scoring_a_prompt_needs_no_output(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="base", prompt=[5, 6, 7], max_tokens=0, echo=True, logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert len(logprobs.tokens or []) == 3
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 0


def test_several_prompts_and_choices_are_numbered_through(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="base", prompt=["he", "ll"], n=2, max_tokens=3, temperature=0, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in reply.choices] == ["he", "he", "ll", "ll"]
    assert reply.choices[0].text == reply.choices[1].text
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 12


def test_seed_makes_a_random_answer_repeatable(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="base", prompt="hello", max_tokens=12, seed=seed).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_models_lists_the_base_and_the_tenants_adapters_with_their_parent(client: openai.OpenAI) -> None:
    models = list(client.models.list())
    assert [model.id for model in models] == ["base", *(f"a{index}" for index in range(10))]
    assert [getattr(model, "parent", "missing") for model in models] == [None, *["base"] * 10]
    assert client.models.retrieve("a3@1").id == "a3@1"
    page = client.models.with_raw_response.list(extra_query={"after": "a7", "limit": 1}).http_response.json()
    assert ([model["id"] for model in page["data"]], page["has_more"]) == (["a8"], True)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"extra_body": {"adapter": "a7"}}),
        (openai.BadRequestError, {"extra_body": {"tools": [{"type": "function"}]}}),
        (openai.BadRequestError, {"extra_body": {"lora": {"name": "a7", "scale": 2}}}),
        (openai.NotFoundError, {"extra_body": {"lora": "nope"}}),
        (openai.NotFoundError, {"model": "gpt-4"}),
    ],
)
def test_faults_raise_the_clients_own_classes(
    client: openai.OpenAI, kind: type[openai.APIStatusError], fields: dict[str, Any]
) -> None:
    asked: Any = {"model": "base", "prompt": "hello", "max_tokens": 1, **fields}
    with pytest.raises(kind) as caught:
        client.completions.create(**asked)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]
    with pytest.raises(kind):
        client.completions.create(**asked, stream=True)


def test_conflict_and_length_have_their_codes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="a7", prompt="hello", extra_body={"lora": None})
    assert caught.value.code == "lora_conflict"
    with pytest.raises(openai.BadRequestError, match=r"600.*512") as caught:
        client.completions.create(model="base", prompt=[1] * 600, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"


def test_keys_are_needed_and_platform_keys_are_shown_the_way(server: Server, tenant: httpx.Client) -> None:
    def client_of(key: str, path: str = "/v1") -> openai.OpenAI:
        return openai.OpenAI(base_url=server.url + path, api_key=key, max_retries=0)

    with client_of("lpx_" + "x" * 43) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with client_of(ADMIN_KEY) as admin, pytest.raises(openai.BadRequestError, match=r"/tenants/\{tenant\}/v1"):
        admin.models.list()
    with client_of(ADMIN_KEY, "/tenants/acme/v1") as admin:
        assert admin.completions.create(model="a7", prompt="hello", max_tokens=1).choices[0].index == 0


def test_scope_infer_is_needed(server: Server, tenant: httpx.Client) -> None:
    with server.create_client("acme", "adapters:read") as reader:
        reply = reader.post("/v1/completions", json={"prompt": "hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "insufficient_scope")
