"""From the chunks of an answer to what is sent: events one by one, or one body. The dialects only format choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.outputs import FinishReason, TokenLogprobs
from loraplex.platform.openai.answer import Answer
from loraplex.platform.openai.responses import Body
from loraplex.platform.openai.schemas import StreamOptions
from loraplex.platform.openai.stream import DONE, encode_event

INLINE_LISTED = 64


@dataclass(slots=True, kw_only=True)
class GatheredChoice:
    """Everything that one choice's chunks brought."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def add(self, chunk: GenerationChunk) -> None:
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        if chunk.prompt_logprobs is not None:
            self.prompt_logprobs = chunk.prompt_logprobs
        if chunk.finish_reason is not None:
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


class Dialect(Protocol):
    """How chat or text completions say it."""

    def deltas(self, chunk: GenerationChunk, *, is_first: bool) -> list[Body]:
        """Choices to send for a chunk, each in an event of its own; none if there is nothing to say yet."""
        ...

    def whole(self, choice: GatheredChoice) -> Body: ...


async def event_stream(answer: Answer, dialect: Dialect, options: StreamOptions | None) -> AsyncGenerator[bytes, None]:
    """Server-sent events; the usage, if asked for, comes last, with no choices."""
    options = options or StreamOptions()
    seen: set[int] = set()
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            deltas = await _format(_num_listed(chunk), partial(dialect.deltas, chunk, is_first=chunk.index not in seen))
            seen.add(chunk.index)
            for delta in deltas:
                yield encode_event(answer.envelope.wrap([delta], **_running_usage(answer, options)))
    if options.include_usage:
        yield encode_event(answer.envelope.wrap([], usage=answer.run.counts.to_body()))
    yield DONE


async def whole_reply(answer: Answer, dialect: Dialect) -> Body:
    """The body of a reply that is not streamed."""
    choices = [GatheredChoice(index=index) for index in range(answer.run.num_choices)]
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            choices[chunk.index].add(chunk)
    bodies = await _format(sum(map(_num_listed, choices)), lambda: [dialect.whole(choice) for choice in choices])
    return answer.envelope.wrap(bodies, usage=answer.run.counts.to_body())


def _num_listed(part: GenerationChunk | GatheredChoice) -> int:
    """Tokens whose log-probabilities are told."""
    return len(part.logprobs) + len(part.prompt_logprobs or ())


async def _format(num_listed: int, work: Callable[[], list[Body]]) -> list[Body]:
    """On a thread where it takes long: each of these tokens names up to 21."""
    return work() if num_listed <= INLINE_LISTED else await asyncio.to_thread(work)


def _running_usage(answer: Answer, options: StreamOptions) -> Body:
    if options.continuous_usage_stats:
        return {"usage": answer.run.counts.to_body()}
    return {"usage": None} if options.include_usage else {}
