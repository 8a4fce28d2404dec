"""One accepted request while it is answered: all its prompts and choices, what they cost, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from msgspec.structs import replace

from loraplex.adapters.errors import ServerError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.chunk_buffer import ChunkBuffer
from loraplex.engine.frontend.session import error_of
from loraplex.engine.outputs import FinishReason
from loraplex.platform.openai.responses import TokenCounts
from loraplex.platform.telemetry.metrics import Metrics

# A request ends as the first of these that one of its choices ended as.
_SEVERITY = (FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP)

Source = Callable[[], AsyncGenerator[GenerationChunk, None]]


class _CancelledError(Exception):
    """Somebody asked the run to end."""


class GenerationRun:
    """Merges the generations of several prompts into one stream; choices count through all prompts.

    `sources` start one generation each, of `num_choices` choices.
    """

    def __init__(self, *, prompts: Sequence[Sequence[int]], sources: Sequence[Source], num_choices: int) -> None:
        self.counts = TokenCounts(prompt=sum(len(prompt) for prompt in prompts))
        self._sources = sources
        self._num_choices = num_choices
        self._cached = [0] * len(sources)
        self._finished: dict[int, FinishReason] = {}
        self._has_failed = False
        self._buffer = ChunkBuffer()

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self._sources) * self._num_choices

    @property
    def has_started(self) -> bool:
        return self.counts.completion > 0

    @property
    def finish_reason(self) -> FinishReason:
        """How the whole request ended: ABORT unless every choice ended, or one failed."""
        if self._has_failed:
            return FinishReason.ERROR
        reasons = set(self._finished.values())
        if len(self._finished) < self.num_choices:
            reasons.add(FinishReason.ABORT)
        return next(reason for reason in _SEVERITY if reason in reasons)

    def cancel(self) -> None:
        """Let every choice that has not ended end with ABORT."""
        self._buffer.fail(_CancelledError())

    async def chunks(self) -> AsyncGenerator[GenerationChunk, None]:
        """Chunks of all choices as they come. Closing the generator aborts in the engine whatever still runs.

        Raises the error by which a choice failed; the others are aborted.
        """
        pumps = [asyncio.create_task(self._pump(index)) for index in range(len(self._sources))]
        try:
            while len(self._finished) < self.num_choices:
                chunk = await self._buffer.get()
                self._settle(chunk)
                yield chunk
        except _CancelledError:
            for index in set(range(self.num_choices)) - set(self._finished):
                self._finished[index] = FinishReason.ABORT
                yield GenerationChunk(index=index, finish_reason=FinishReason.ABORT)
        except Exception:
            self._has_failed = True
            raise
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _settle(self, chunk: GenerationChunk) -> None:
        prompt_index = chunk.index // self._num_choices
        self._cached[prompt_index] = max(self._cached[prompt_index], chunk.num_cached_tokens)
        self.counts.cached = sum(self._cached)
        self.counts.completion += len(chunk.token_ids)
        if chunk.error is not None:
            raise error_of(chunk.error)
        if chunk.finish_reason is not None:
            self._finished[chunk.index] = chunk.finish_reason

    async def _pump(self, prompt_index: int) -> None:
        num_unfinished = self._num_choices
        try:
            async with aclosing(self._sources[prompt_index]()) as chunks:
                async for chunk in chunks:
                    num_unfinished -= chunk.finish_reason is not None
                    self._buffer.put(replace(chunk, index=prompt_index * self._num_choices + chunk.index))
            if num_unfinished:
                raise ServerError("the engine left a request without saying how it ended")
        except Exception as error:  # raised again where the chunks are read
            self._buffer.fail(error)


class Timings:
    """Feeds the two latency histograms from the chunks of one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._arrival = time.monotonic()
        self._last_token: dict[int, float] = {}
        self._has_token = False

    def observe(self, chunk: GenerationChunk) -> None:
        if not chunk.token_ids:
            return
        now = time.monotonic()
        if not self._has_token:
            self._has_token = True
            self._metrics.time_to_first_token.observe(now - self._arrival)
        elif chunk.index in self._last_token:
            self._metrics.inter_token_latency.observe((now - self._last_token[chunk.index]) / len(chunk.token_ids))
        self._last_token[chunk.index] = now
