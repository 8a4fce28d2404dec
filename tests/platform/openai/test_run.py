"""One request of several prompts and choices: numbering, counting, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from loraplex.adapters.errors import AdapterLoadError, ServerError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.outputs import ErrorInfo, FinishReason
from loraplex.platform.errors import NotFoundError
from loraplex.platform.openai.run import GenerationRun, Source
from loraplex.platform.openai.running import RunningRequests


def token(index: int = 0, *, finish: FinishReason | None = None, cached: int = 0) -> GenerationChunk:
    return GenerationChunk(index=index, text="x", token_ids=(1,), finish_reason=finish, num_cached_tokens=cached)


class Prompt:
    """A generation that says `chunks` and then, if it has not ended, waits until it is closed."""

    def __init__(self, *chunks: GenerationChunk | Exception, ends: bool = False) -> None:
        self._chunks = chunks
        self._ends = ends
        self.is_closed = False

    async def generate(self) -> AsyncGenerator[GenerationChunk, None]:
        try:
            for chunk in self._chunks:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                await asyncio.sleep(0)
            if not self._ends:
                await asyncio.Event().wait()
        finally:
            self.is_closed = True


def create_run(*prompts: Prompt, num_choices: int = 1) -> GenerationRun:
    sources: Sequence[Source] = [prompt.generate for prompt in prompts]
    return GenerationRun(prompts=[[1, 2, 3]] * len(prompts), sources=sources, num_choices=num_choices)


async def read(run: GenerationRun) -> list[GenerationChunk]:
    return [chunk async for chunk in run.chunks()]


async def test_choices_count_through_all_prompts_and_a_prompt_counts_once() -> None:
    ends = [token(0, finish=FinishReason.STOP, cached=2), token(1, finish=FinishReason.LENGTH)]
    run = create_run(Prompt(*ends, ends=True), Prompt(*ends, ends=True), num_choices=2)
    assert sorted(chunk.index for chunk in await read(run)) == [0, 1, 2, 3]
    assert (run.counts.prompt, run.counts.cached, run.counts.completion) == (6, 4, 4)
    assert run.finish_reason is FinishReason.LENGTH


async def test_error_of_one_choice_ends_all_and_is_raised_as_what_it_was() -> None:
    other = Prompt(token())
    failed = GenerationChunk(
        index=0, finish_reason=FinishReason.ERROR, error=ErrorInfo(code=AdapterLoadError.code, message="gone")
    )
    run = create_run(other, Prompt(token(), failed))
    with pytest.raises(AdapterLoadError, match="gone"):
        await read(run)
    assert other.is_closed
    assert run.finish_reason is FinishReason.ERROR


async def test_exception_of_a_generation_is_raised_where_chunks_are_read() -> None:
    with pytest.raises(AdapterLoadError):
        await read(create_run(Prompt(token(), AdapterLoadError("gone"))))


async def test_generation_that_ends_without_a_word_is_an_error_not_a_hang() -> None:
    with pytest.raises(ServerError, match="without saying"):
        await read(create_run(Prompt(token(), ends=True)))


async def test_cancelled_run_says_abort_for_every_choice_that_has_not_ended() -> None:
    prompt = Prompt(token(0, finish=FinishReason.STOP), token(1))
    run = create_run(prompt, num_choices=3)
    reasons: dict[int, FinishReason] = {}
    async for chunk in run.chunks():
        if chunk.finish_reason:
            reasons[chunk.index] = chunk.finish_reason
        if chunk.index == 1:
            run.cancel()
    assert reasons == {0: FinishReason.STOP, 1: FinishReason.ABORT, 2: FinishReason.ABORT}
    assert prompt.is_closed
    assert run.finish_reason is FinishReason.ABORT


async def test_reader_that_leaves_aborts_everything() -> None:
    prompt = Prompt(token())
    run = create_run(prompt)
    chunks = run.chunks()
    await anext(chunks)
    await chunks.aclose()
    assert prompt.is_closed
    assert run.finish_reason is FinishReason.ABORT
    assert run.counts.completion == 1


class FakeAnswer:
    """What `RunningRequests` keeps of an answer."""

    def __init__(self, request_id: str, tenant_id: str, *, has_started: bool = False) -> None:
        self.request_id = request_id
        self.tenant_id = tenant_id
        self.adapter_names = (f"of-{request_id}",)
        self.has_started = has_started
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


async def test_running_requests_are_found_by_their_own_tenant_only() -> None:
    running = RunningRequests()
    one, two = FakeAnswer("one", "acme", has_started=True), FakeAnswer("two", "other")
    with running.track(one), running.track(two):
        for request_id, tenant_id in (("one", "other"), ("three", "acme")):
            with pytest.raises(NotFoundError):
                running.cancel(request_id, tenant_id=tenant_id)
        running.cancel("one", tenant_id="acme")
        assert (one.is_cancelled, two.is_cancelled) == (True, False)
        assert (running.running_adapters(), running.waiting_adapters()) == ({"of-one"}, {"of-two"})
    assert len(running) == 0
