"""What a prompt costs before it runs: nothing that cannot fit is tokenized, and nothing long on the event loop."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.errors import ContextLengthError
from loraplex.engine.outputs import TokenLogprobs
from loraplex.platform.openai.lora_field import parse_lora
from loraplex.platform.openai.replies import INLINE_LISTED, GatheredChoice, whole_reply
from loraplex.platform.openai.schemas import MAX_MESSAGES, ChatCompletionBody, CompletionBody
from loraplex.platform.openai.service import INLINE_CHARS, InferenceService

MAX_MODEL_LEN = 4_000
LONGEST_TOKEN = 3


class RecordingTokenizer:
    longest_token = LONGEST_TOKEN

    def __init__(self) -> None:
        self.threads: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.current_thread().name)
        return [1]


def service(tokenizer: RecordingTokenizer) -> InferenceService:
    services = SimpleNamespace(
        tokenizer=tokenizer,
        engine=SimpleNamespace(info=SimpleNamespace(max_model_len=MAX_MODEL_LEN, vocab_size=8)),
        tokenizing=ThreadPoolExecutor(1, thread_name_prefix="tokenizing"),
        running=None,
        usage=None,
        metrics=None,
    )
    return InferenceService(cast(Any, services))


async def test_a_text_that_cannot_fit_is_refused_untokenized() -> None:
    tokenizer = RecordingTokenizer()
    body = CompletionBody(prompt=["short", "x" * (LONGEST_TOKEN * MAX_MODEL_LEN + 1)])
    with pytest.raises(ContextLengthError, match="12001 characters"):
        await service(tokenizer)._encode(body)
    assert tokenizer.threads == []


async def test_a_text_that_could_fit_is_tokenized() -> None:
    tokenizer = RecordingTokenizer()
    assert await service(tokenizer)._encode(CompletionBody(prompt="x" * LONGEST_TOKEN * MAX_MODEL_LEN)) == [[1]]


@pytest.mark.parametrize("prompt", ["x" * (INLINE_CHARS + 1), ["x" * 100] * 100])
async def test_much_text_in_one_or_many_prompts_is_tokenized_off_the_event_loop(prompt: Any) -> None:
    tokenizer = RecordingTokenizer()
    await service(tokenizer)._encode(CompletionBody(prompt=prompt))
    assert {name.partition("_")[0] for name in tokenizer.threads} == {"tokenizing"}


def test_a_long_prompt_of_token_ids_is_refused_for_its_length_alone() -> None:
    prompt = [-1] * (MAX_MODEL_LEN + 1)
    with pytest.raises(ContextLengthError):
        service(RecordingTokenizer())._check_prompt(prompt, cast(Any, SimpleNamespace(max_tokens=1)))


def test_a_mix_of_very_many_parts_is_refused_before_they_are_read() -> None:
    with pytest.raises(InvalidRequestError, match="a mix of 9 adapters; at most 8"):
        parse_lora([5] * 9)


def test_a_conversation_has_an_end() -> None:
    messages = [{"role": "user", "content": "a"}] * (MAX_MESSAGES + 1)
    with pytest.raises(ValidationError):
        ChatCompletionBody(messages=cast(Any, messages))


@pytest.mark.parametrize(("num_tokens", "is_inline"), [(INLINE_LISTED, True), (INLINE_LISTED + 1, False)])
async def test_many_logprobs_are_formatted_off_the_event_loop(num_tokens: int, is_inline: bool) -> None:
    token = TokenLogprobs(token_id=1, logprob=-1.0, rank=1, top=())
    threads: list[threading.Thread] = []

    class Dialect:
        def whole(self, choice: GatheredChoice) -> dict[str, Any]:
            threads.append(threading.current_thread())
            return {}

    async def chunks() -> Any:
        yield SimpleNamespace(
            index=0,
            text="",
            token_ids=(1,) * num_tokens,
            logprobs=(token,) * num_tokens,
            prompt_logprobs=None,
            finish_reason=None,
        )

    answer = SimpleNamespace(
        chunks=chunks,
        run=SimpleNamespace(num_choices=1, counts=SimpleNamespace(to_body=dict)),
        envelope=SimpleNamespace(wrap=lambda choices, usage: choices),
    )
    await whole_reply(cast(Any, answer), cast(Any, Dialect()))
    assert (threads == [threading.current_thread()]) is is_inline
