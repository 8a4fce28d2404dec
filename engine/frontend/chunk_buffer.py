"""Chunks of several choices on their way to one reader, merged while it is busy elsewhere."""

from __future__ import annotations

import asyncio

import msgspec

from loraplex.engine.frontend.chunk import GenerationChunk


class ChunkBuffer:
    """Holds at most one chunk per choice, so a slow reader never makes it grow beyond the answer."""

    def __init__(self) -> None:
        self._pending: dict[int, GenerationChunk] = {}  # by choice, in the order of their first news
        self._error: BaseException | None = None
        self._has_news = asyncio.Event()

    def put(self, chunk: GenerationChunk) -> None:
        earlier = self._pending.get(chunk.index)
        self._pending[chunk.index] = merge(earlier, chunk) if earlier else chunk
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """What is pending can still be read; then `get` raises."""
        self._error = self._error or error
        self._has_news.set()

    async def get(self) -> GenerationChunk:
        await self._has_news.wait()
        if not self._pending:
            assert self._error is not None
            raise self._error
        chunk = self._pending.pop(next(iter(self._pending)))
        if not self._pending and self._error is None:
            self._has_news.clear()
        return chunk


def merge(first: GenerationChunk, second: GenerationChunk) -> GenerationChunk:
    """Two successive chunks of one choice as one."""
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
    )
