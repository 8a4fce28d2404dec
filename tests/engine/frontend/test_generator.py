"""Chunks of all choices as they come; closing, cancelling and a slow reader cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.errors import EngineDeadError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.generator import Generator
from loraplex.engine.frontend.inprocess import InProcessEngineClient
from loraplex.engine.frontend.local_source import LocalAdapterSource
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.messages import IntegrityReport
from loraplex.engine.outputs import FinishReason
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.sampling_params import SamplingParams
from tests.engine.frontend.helpers import MAX_POSITIONS, engine_config, until
from tests.helpers import make_byte_level_tokenizer, make_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOTHING = IntegrityReport(num_requests=0, num_blocks_in_use=0, num_leases=0, num_references=0, num_pending_loads=0)
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_byte_level_tokenizer(make_checkpoint(folder, vocab_size=300, max_position_embeddings=MAX_POSITIONS))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_folder(model)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(model: Path) -> AsyncIterator[InProcessEngineClient]:
    client = InProcessEngineClient(engine_config(model), LocalAdapterSource())
    await client.start()
    yield client
    await client.stop()


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | fields))


async def collect(generator: Generator, request_id: str, sampling_params: SamplingParams) -> list[GenerationChunk]:
    async with aclosing(generator.generate(request_id, PROMPT, sampling_params)) as chunks:
        return [chunk async for chunk in chunks]


async def test_each_choice_ends_once_and_draws_with_its_own_seed(
    client: InProcessEngineClient, tokenizer: Tokenizer
) -> None:
    generator = Generator(client, tokenizer)
    chunks = await collect(generator, "n", params(n=4, seed=7, logprobs=1))
    assert sorted(chunk.index for chunk in chunks if chunk.finish_reason) == [0, 1, 2, 3]
    for index in range(4):
        alone = await collect(generator, f"alone-{index}", params(seed=7 + index))
        ids = tuple(token for chunk in chunks if chunk.index == index for token in chunk.token_ids)
        assert ids == tuple(token for chunk in alone for token in chunk.token_ids)
        own = [chunk for chunk in chunks if chunk.index == index]
        assert "".join(chunk.text for chunk in own) == tokenizer.decode(ids)
        assert [entry.token_id for chunk in own for entry in chunk.logprobs] == list(ids)
    assert await client.integrity() == NOTHING


async def test_only_the_first_choice_tells_of_cached_tokens(client: InProcessEngineClient) -> None:
    generator = Generator(client, None)
    long_prompt = list(range(100, 164))
    async with aclosing(generator.generate("cold", long_prompt, params(n=3))) as chunks:
        assert sum([chunk.num_cached_tokens async for chunk in chunks]) == 0
    async with aclosing(generator.generate("warm", long_prompt, params(n=3))) as chunks:
        assert {chunk.index for chunk in [chunk async for chunk in chunks] if chunk.num_cached_tokens} == {0}


async def test_closing_the_stream_aborts_every_choice(client: InProcessEngineClient, tokenizer: Tokenizer) -> None:
    stream = Generator(client, tokenizer).generate("closed", PROMPT, params(n=3, max_tokens=5000))
    await anext(stream)
    await stream.aclose()
    assert await client.integrity() == NOTHING


async def test_cancelling_the_reader_aborts_the_request(client: InProcessEngineClient, tokenizer: Tokenizer) -> None:
    reader = asyncio.create_task(collect(Generator(client, tokenizer), "cancelled", params(max_tokens=5000)))
    await until(lambda: client.stats.num_running == 1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await client.integrity() == NOTHING


async def test_a_stop_string_ends_the_choice_and_the_engines_request(
    client: InProcessEngineClient, tokenizer: Tokenizer
) -> None:
    (letter,) = tokenizer.encode("a")
    stopped = params(max_tokens=5000, stop=("aaaa",), logit_bias={letter: 100.0}, temperature=0.0)
    chunks = await collect(Generator(client, tokenizer), "stopped", stopped)
    assert "".join(chunk.text for chunk in chunks) == ""
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, "aaaa")
    assert sum(len(chunk.token_ids) for chunk in chunks) == 4
    assert await client.integrity() == NOTHING


async def test_a_slow_reader_gets_fewer_chunks_with_everything_in_them(
    client: InProcessEngineClient, tokenizer: Tokenizer
) -> None:
    generator = Generator(client, tokenizer)
    stream = generator.generate("slow", PROMPT, params(max_tokens=64, temperature=0.0))
    first = await anext(stream)
    await collect(generator, "fast", params(max_tokens=84))  # ends many steps later
    rest = [chunk async for chunk in stream]
    assert len(rest) == 1
    assert len(first.token_ids) + len(rest[0].token_ids) == 64


async def test_stop_strings_need_a_tokenizer(client: InProcessEngineClient) -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        await collect(Generator(client, None), "x", params(stop=("a",)))


async def test_a_request_id_in_use_is_refused(client: InProcessEngineClient) -> None:
    generator = Generator(client, None)
    stream = generator.generate("twice", PROMPT, params(max_tokens=5000))
    await anext(stream)
    with pytest.raises(InvalidRequestError, match="already in use"):
        await collect(generator, "twice", params())
    assert await anext(stream)
    await stream.aclose()


async def test_a_step_that_raises_ends_streams_and_calls(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = InProcessEngineClient(engine_config(model), LocalAdapterSource())
    await client.start()
    stream = Generator(client, None).generate("poison", PROMPT, params(max_tokens=5000))
    await anext(stream)
    monkeypatch.setattr(ModelRunner, "execute", None)
    with pytest.raises(EngineDeadError, match="the engine failed"):
        _ = [chunk async for chunk in stream]
    assert client.state is EngineState.STOPPED
    with pytest.raises(EngineDeadError):
        await client.integrity()
    await client.stop()
