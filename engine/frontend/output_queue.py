"""The outputs of one request that nobody has read yet, merged into one."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from loraplex.adapters.errors import LoraplexError
from loraplex.engine.outputs import RequestOutput


class OutputQueue:
    """Holds at most one output: a reader slower than the engine finds everything new in it at once."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._error: LoraplexError | None = None
        self._has_news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        self._pending = merge(self._pending, output) if self._pending else output
        self._has_news.set()

    def fail(self, error: LoraplexError) -> None:
        """What is pending can still be read; then `get` raises."""
        self._error = error
        self._has_news.set()

    async def get(self) -> RequestOutput:
        await self._has_news.wait()
        output, self._pending = self._pending, None
        if output is None:
            assert self._error is not None
            raise self._error
        if self._error is None:
            self._has_news.clear()
        return output


def merge(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two successive outputs of one request as one."""
    return replace(
        second,
        new_token_ids=first.new_token_ids + second.new_token_ids,
        new_logprobs=first.new_logprobs + second.new_logprobs,
        prompt_logprobs=first.prompt_logprobs if second.prompt_logprobs is None else second.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
    )
