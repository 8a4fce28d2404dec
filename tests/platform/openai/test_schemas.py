"""Which bodies are read, and which are refused before anything else looks at them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.openai.lora_field import ABSENT
from loraplex.platform.openai.sampling import chat_sampling_params, completion_sampling_params
from loraplex.platform.openai.schemas import ChatCompletionBody, CompletionBody


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "hello", **fields})


def chat(**fields: Any) -> ChatCompletionBody:
    return ChatCompletionBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize(
    "name",
    ["loras", "lora_name", "lora_path", "adapter", "adapter_id", "lora_request", "LoRA", "my_adapters", "x-lora"],
)
def test_misspelt_lora_is_refused_even_when_null(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="use `lora`"):
        completion(**{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("best_of", 2),
        ("suffix", "x"),
        ("chat_template", "{{ x }}"),
        ("guided_json", {}),
        ("top_a", 0.5),
        ("stop_sequences", ["x"]),
        ("\ud800", 1),
    ],
)
def test_field_that_could_change_the_answer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(**{name: value})
    assert caught.value.param is not None
    assert caught.value.param in caught.value.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("user", "u1"),
        ("store", True),
        ("metadata", {"a": "b"}),
        ("service_tier", "auto"),
        ("priority", 3),
        ("tools", None),
        ("tools", []),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("tool_choice", "none"),
    ],
)
def test_field_that_cannot_change_the_answer_is_ignored(name: str, value: object) -> None:
    assert completion(**{name: value}) == completion()


def test_true_is_no_neutral_one() -> None:
    with pytest.raises(InvalidRequestError):
        completion(best_of=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "0.5"},
        {"n": "2"},
        {"n": True},
        {"max_tokens": 5.0},
        {"stream": "true"},
        {"stop": 3},
        {"stop": ["x"] * 17},
        {"logit_bias": {"5": "x"}},
        {"logprobs": True},
        {"model": 3},
        {"seed": 1.5},
    ],
)
def test_wrong_type_of_a_known_field_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)


def test_null_means_the_default_but_lora_null_is_the_base() -> None:
    body = completion(n=None, temperature=None, stream=None, stop=None, model=None, max_tokens=None)
    assert completion_sampling_params(body) == completion_sampling_params(completion())
    assert completion().lora_or_absent is ABSENT
    assert completion(lora=None).lora_or_absent is None


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompt_is_text_or_token_ids_one_or_several(prompt: Any, prompts: list[object]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []], ["a", 1], [1, "a"], [True], [1.0], 3, {}, ["a"] * 129])
def test_any_other_prompt_is_refused_in_one_plain_sentence(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompt must be a string"):
        completion(prompt=prompt)


def test_content_is_a_string_or_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = chat(messages=[{"role": "user", "content": "one"}, {"role": "user", "content": parts}])
    assert [message.text for message in body.messages] == ["one", "one\ntwo"]


def test_a_reply_can_be_sent_back_as_history() -> None:
    reply: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "annotations": [],
    }
    assert chat(messages=[reply]).messages[0].text == "hi"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "root", "content": "hi"},
        {"role": "user", "content": None},
    ],
)
def test_message_that_would_lose_something_is_refused(message: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        chat(messages=[message])


def test_chat_runs_to_the_end_of_the_context_and_completions_16_tokens() -> None:
    assert chat_sampling_params(chat()).max_tokens is None
    assert completion_sampling_params(completion()).max_tokens == 16


def test_max_completion_tokens_is_max_tokens_under_its_new_name() -> None:
    assert chat_sampling_params(chat(max_completion_tokens=5)).max_tokens == 5
    assert chat_sampling_params(chat(max_tokens=5)).max_tokens == 5
    with pytest.raises(InvalidRequestError):
        chat_sampling_params(chat(max_tokens=5, max_completion_tokens=6))


def test_chat_logprobs_need_the_switch() -> None:
    assert chat_sampling_params(chat()).logprobs is None
    assert chat_sampling_params(chat(logprobs=True)).logprobs == 0
    assert chat_sampling_params(chat(logprobs=True, top_logprobs=5)).logprobs == 5
    with pytest.raises(InvalidRequestError):
        chat_sampling_params(chat(top_logprobs=5))
    with pytest.raises(InvalidRequestError):
        chat_sampling_params(chat(logprobs=True, top_logprobs=21))


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert completion_sampling_params(completion(echo=True, logprobs=2)).prompt_logprobs == 2
    assert completion_sampling_params(completion(logprobs=2)).prompt_logprobs is None
    assert completion_sampling_params(completion(echo=True, max_tokens=0)).max_tokens == 0
    with pytest.raises(InvalidRequestError):
        completion_sampling_params(completion(max_tokens=0))


@pytest.mark.parametrize("key", ["x", "", "--1", "²"])
def test_logit_bias_keys_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequestError):
        completion_sampling_params(completion(logit_bias={key: 1}))


def test_top_k_of_minus_one_is_off() -> None:
    assert completion_sampling_params(completion(top_k=-1)).top_k == 0
