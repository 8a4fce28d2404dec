"""Turns a body into an `Answer`: everything that can be wrong with a request is found here, before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar, cast

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import LoraSelection
from loraplex.engine.errors import ContextLengthError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.sampling_checks import check_sampling_params, check_token_ids
from loraplex.engine.sampling_params import SamplingParams
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
TEXT_CHARS = 16  # what a text costs however short it is (of the chat template, say), in characters

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
        prompt = await self._tokenize(
            [message["content"] for message in messages],
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
        prompts = await self._encode(body)
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
        limit = self._services.engine.info.max_model_len
        num_tokens = len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
        if num_tokens > limit:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; together they may be "
                f"{limit} at most: shorten the prompt or lower max_tokens",
                param="prompt",
            )
        check_token_ids("prompt", (min(prompt), max(prompt)), self._services.engine.info.vocab_size)

    def _require_tokenizer(self, why: str) -> Tokenizer:
        if self._services.tokenizer is None:
            raise InvalidRequestError(f"this server has no tokenizer: {why}", param="prompt")
        return self._services.tokenizer

    async def _encode(self, body: CompletionBody) -> list[TokenIds]:
        texts = [prompt for prompt in body.prompts if isinstance(prompt, str)]
        if not texts:
            return cast("list[TokenIds]", body.prompts)
        tokenizer = self._require_tokenizer("give the prompt as token ids")
        return await self._tokenize(
            texts,
            lambda: [tokenizer.encode(text, add_special_tokens=body.add_special_tokens) for text in texts],
        )

    async def _tokenize(self, texts: Sequence[str], work: Callable[[], T]) -> T:
        """Long texts one after the other on a thread of their own: they wait for nobody's upload, and keep none up."""
        self._check_length(max(texts, key=len))
        if sum(len(text) + TEXT_CHARS for text in texts) <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._services.tokenizing, work)

    def _check_length(self, text: str) -> None:
        """Refuse a text that cannot fit before the seconds that tokenizing all of it would take."""
        assert self._services.tokenizer is not None
        limit = self._services.engine.info.max_model_len
        if len(text) > limit * self._services.tokenizer.longest_token:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which are more than {limit} tokens, the most that prompt and "
                "answer may have together: shorten it",
                param="prompt",
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
