"""Turns a body into an `Answer`: everything that can be wrong with a request is found here, before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import LoraSelection
from loraplex.engine.errors import ContextLengthError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.sampling_checks import check_sampling_params
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.adapters.naming import shown
from loraplex.platform.openai import chat, completion
from loraplex.platform.openai.answer import Answer, Caller, Ledger
from loraplex.platform.openai.chat import ChatDialect
from loraplex.platform.openai.completion import CompletionDialect
from loraplex.platform.openai.logprobs import TokenIdNames, TokenNames
from loraplex.platform.openai.lora_field import parse_address
from loraplex.platform.openai.responses import Envelope
from loraplex.platform.openai.run import GenerationRun
from loraplex.platform.openai.sampling import chat_sampling_params, completion_sampling_params
from loraplex.platform.openai.schemas import ChatCompletionBody, CompletionBody, GenerationBody, TokenIds
from loraplex.platform.services import Services

MAX_TOTAL_CHOICES = 1024  # prompts times n
INLINE_CHARS = 4_000  # a longer text is tokenized on a thread: a megabyte takes most of a second

T = TypeVar("T")


class InferenceService:
    """Makes answers for one server process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._ledger = Ledger(running=services.running, usage=services.usage, metrics=services.metrics)

    async def chat(self, body: ChatCompletionBody, caller: Caller) -> tuple[Answer, ChatDialect]:
        """Raises a LoraplexError for everything that is wrong with the request."""
        self._services.check_ready()
        params = chat_sampling_params(body)
        tokenizer = self._require_tokenizer("chat needs a chat template; send token ids to /v1/completions")
        messages = [{"role": _template_role(message.role), "content": message.text} for message in body.messages]
        num_chars = sum(len(message["content"]) for message in messages)
        prompt = await _off_loop_if_long(
            num_chars,
            lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=body.add_generation_prompt),
        )
        kind = chat.CHUNK if body.stream else chat.REPLY
        answer = await self._answer(body, caller, kind=kind, prompts=[prompt], params=params)
        return answer, ChatDialect(body, answer.names)

    async def complete(self, body: CompletionBody, caller: Caller) -> tuple[Answer, CompletionDialect]:
        """Raises a LoraplexError for everything that is wrong with the request."""
        self._services.check_ready()
        params = completion_sampling_params(body)
        if len(body.prompts) * params.n > MAX_TOTAL_CHOICES:
            raise InvalidRequestError(
                f"{len(body.prompts)} prompts with n = {params.n} are {len(body.prompts) * params.n} choices; "
                f"{MAX_TOTAL_CHOICES} are allowed: send several requests",
                param="n",
            )
        prompts = [await self._encode(prompt, body) for prompt in body.prompts]
        answer = await self._answer(body, caller, kind=completion.REPLY, prompts=prompts, params=params)
        return answer, CompletionDialect(body, answer.names, self._echoes(body, prompts))

    async def _answer(
        self, body: GenerationBody, caller: Caller, *, kind: str, prompts: list[TokenIds], params: SamplingParams
    ) -> Answer:
        address = parse_address(body.model, body.lora_or_absent, served_name=self._services.settings.served_model_name)
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        check_sampling_params(params, self._services.engine.info.vocab_size)
        for prompt in prompts:
            self._check_prompt(prompt, params)
        resolved = await self._services.registry.resolve(caller.tenant, address.adapters)
        sources = [
            self._source(prompt, params, resolved.selection, caller, index) for index, prompt in enumerate(prompts)
        ]
        return Answer(
            caller=caller,
            envelope=Envelope(id=caller.request_id, object=kind, model=address.model, adapters=resolved.adapters),
            resolved=resolved,
            hold=self._services.registry.hold(resolved),
            run=GenerationRun(prompts=prompts, sources=sources, num_choices=params.n),
            names=self._names(body),
            ledger=self._ledger,
        )

    def _source(
        self, prompt: TokenIds, params: SamplingParams, selection: LoraSelection, caller: Caller, index: int
    ) -> Callable[[], AsyncGenerator[GenerationChunk, None]]:
        return lambda: self._services.generator.generate(
            request_id=f"{caller.request_id}.{index}",
            prompt_token_ids=prompt,
            sampling_params=params,
            selection=selection,
            tenant_id=caller.tenant.id,
            cache_salt=caller.tenant.cache_salt,
        )

    def _check_prompt(self, prompt: TokenIds, params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt has no tokens; give at least one", param="prompt")
        vocab_size = self._services.engine.info.vocab_size
        wrong = next((token_id for token_id in prompt if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(
                f"the prompt has the token id {shown(str(wrong))[1:-1]}; ids lie between 0 and {vocab_size - 1}",
                param="prompt",
            )
        limit = self._services.engine.info.max_model_len
        num_tokens = len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together they may be "
                f"{limit} at most: shorten the prompt or lower max_tokens",
                param="prompt",
            )

    def _require_tokenizer(self, why: str) -> Tokenizer:
        if self._services.tokenizer is None:
            raise InvalidRequestError(f"this server has no tokenizer: {why}", param="prompt")
        return self._services.tokenizer

    async def _encode(self, prompt: str | TokenIds, body: CompletionBody) -> TokenIds:
        if not isinstance(prompt, str):
            return prompt
        tokenizer = self._require_tokenizer("give the prompt as token ids")
        return await _off_loop_if_long(
            len(prompt), lambda: tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
        )

    def _echoes(self, body: CompletionBody, prompts: Sequence[TokenIds]) -> list[tuple[TokenIds, str]]:
        """Each prompt with the text that `echo` shows: as it was sent, or what its token ids say."""
        tokenizer = self._services.tokenizer
        texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(prompt) if tokenizer and body.echo else ""
            for prompt in body.prompts
        ]
        return list(zip(prompts, texts, strict=True))

    def _names(self, body: GenerationBody) -> TokenNames:
        tokenizer = self._services.tokenizer
        return TokenIdNames() if tokenizer is None or body.return_tokens_as_token_ids else tokenizer


def _template_role(role: str) -> str:
    """`developer` is OpenAI's newer name for `system`, which no template knows."""
    return "system" if role == "developer" else role


async def _off_loop_if_long(num_chars: int, work: Callable[[], T]) -> T:
    return work() if num_chars <= INLINE_CHARS else await asyncio.to_thread(work)
