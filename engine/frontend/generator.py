"""From a prompt's tokens to chunks of text: n choices, stop strings, detokenizing. What the API streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import BASE, LoraSelection
from loraplex.engine.frontend.children import split_choices
from loraplex.engine.frontend.choice import Choice
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.chunk_buffer import ChunkBuffer
from loraplex.engine.frontend.protocol import EngineClient
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.sampling_params import SamplingParams


class Generator:
    """Generates text through an engine. Without a tokenizer `text` is always empty."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer | None) -> None:
        self._client = client
        self._tokenizer = tokenizer

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        selection: LoraSelection = BASE,
        tenant_id: str = "",
        cache_salt: bytes = b"",
        priority_class: str = "normal",
        share: float = 1.0,
        deadline_s: float | None = None,
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Chunks of all choices as they come; each choice ends with one chunk that has a `finish_reason`.

        Closing the iterator aborts every choice in the engine. A reader slower than the engine gets larger chunks,
        not more of them. `num_cached_tokens` is told by choice 0 alone: the others find what choice 0 computed.

        Raises:
            InvalidRequestError: stop strings without a tokenizer.
            EngineDeadError: the engine ended, or takes no requests now.
        """
        if sampling_params.stop and self._tokenizer is None:
            raise InvalidRequestError("stop strings need a tokenizer; use stop_token_ids", param="stop")
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=sampling_params,
            selection=selection,
            tenant_id=tenant_id,
            cache_salt=cache_salt,
            priority_class=priority_class,
            share=share,
            deadline_s=deadline_s,
        )
        requests = split_choices(request)
        choices = self._choice(0, request) if len(requests) == 1 else self._merged(requests)
        async with aclosing(choices) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _merged(self, requests: list[GenerateRequest]) -> AsyncGenerator[GenerationChunk, None]:
        buffer = ChunkBuffer()
        tasks = [asyncio.create_task(self._pump(index, request, buffer)) for index, request in enumerate(requests)]
        try:
            num_open = len(tasks)
            while num_open:
                chunk = await buffer.get()
                num_open -= chunk.finish_reason is not None
                yield chunk
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, index: int, request: GenerateRequest, buffer: ChunkBuffer) -> None:
        try:
            async with aclosing(self._choice(index, request)) as chunks:
                async for chunk in chunks:
                    buffer.put(msgspec.structs.replace(chunk, num_cached_tokens=0) if index else chunk)
        except Exception as error:  # raised again where the chunks are read
            buffer.fail(error)

    async def _choice(self, index: int, request: GenerateRequest) -> AsyncGenerator[GenerationChunk, None]:
        """One choice's chunks. Leaving the engine's stream early, at a stop string say, aborts it."""
        choice = Choice(
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            params=request.sampling_params,
            tokenizer=self._tokenizer,
        )
        async with aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                if chunk := choice.push(output):
                    yield chunk
                if choice.is_finished:
                    return
