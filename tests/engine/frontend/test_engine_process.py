"""The engine behind its process boundary: lives, dies, comes back, and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from loraplex.adapters.errors import AdapterLoadError
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.engine.errors import ConfigurationError, EngineDeadError
from loraplex.engine.frontend.engine_client import ProcessEngineClient
from loraplex.engine.frontend.engine_handle import EngineHandle
from loraplex.engine.frontend.engine_process import EXIT_LOOP_FAILED
from loraplex.engine.frontend.inprocess import InProcessEngineClient
from loraplex.engine.frontend.local_source import create_local_source
from loraplex.engine.frontend.protocol import EngineClient, EngineState
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.messages import GenerateRequest, IntegrityReport
from loraplex.engine.outputs import FinishReason, RequestOutput
from tests.engine.frontend.helpers import (
    MAX_POSITIONS,
    collect,
    endless,
    engine_config,
    process_client,
    request,
    until,
)
from tests.helpers import make_adapter, make_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[3]
NOTHING = IntegrityReport(num_requests=0, num_blocks_in_use=0, num_leases=0, num_references=0, num_pending_loads=0)
SECRETS = {
    "LORAPLEX_SECRET_KEY": "s1",
    "AWS_SECRET_ACCESS_KEY": "s2",
    "DATABASE_URL": "s3",
    "HF_TOKEN": "s4",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_POSITIONS)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), model)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(model: Path, adapter: Path) -> AsyncIterator[ProcessEngineClient]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        client = process_client(engine_config(model), adapter)
        await client.start()
    yield client
    await client.stop()


def ref_of(adapter: Path) -> AdapterRef:
    return AdapterRef(create_local_source([]).add(adapter), num_attention_slots=1, num_mlp_slots=1)


async def whole_answer(client: EngineClient, asked: GenerateRequest) -> RequestOutput:
    """All outputs as one: how many tokens come at once depends on how quickly they are read."""
    async with aclosing(client.generate(asked)) as stream:
        outputs = [output async for output in stream]
    return replace(
        outputs[-1],
        new_token_ids=tuple(token_id for output in outputs for token_id in output.new_token_ids),
        new_logprobs=tuple(entry for output in outputs for entry in output.new_logprobs),
    )


async def test_answers_equal_those_of_the_same_engine_in_process(
    client: ProcessEngineClient, model: Path, adapter: Path
) -> None:
    twin = InProcessEngineClient(engine_config(model), create_local_source([str(adapter)]))
    await twin.start()
    selection = LoraSelection.single(ref_of(adapter))
    try:
        for selected in (LoraSelection(), selection):
            asked = request(f"same-{selected.is_base}", selection=selected, params={"logprobs": 2})
            assert await whole_answer(client, asked) == await whole_answer(twin, asked)
        assert await twin.integrity() == NOTHING
        assert twin.info == client.info
    finally:
        await twin.stop()


async def test_a_bad_request_ends_with_its_reason_and_the_engine_serves_on(client: ProcessEngineClient) -> None:
    _, last = await collect(client, request("bad", prompt_token_ids=[100_000]))
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "100000" in last.error.message
    assert len((await collect(client, request("good")))[0]) == 8


async def test_closing_a_stream_early_frees_everything(client: ProcessEngineClient, adapter: Path) -> None:
    selection = LoraSelection.single(ref_of(adapter))
    async with aclosing(client.generate(request("early", selection=selection, params={"max_tokens": 5000}))) as outputs:
        async for output in outputs:
            assert output.new_token_ids
            break
    assert await client.integrity() == NOTHING


async def test_an_aborted_request_ends_as_aborted(client: ProcessEngineClient) -> None:
    stream = client.generate(endless("aborted"))
    await anext(stream)
    await client.abort(["aborted"])
    last = [output async for output in stream][-1]
    assert last.finish_reason is FinishReason.ABORT
    assert await client.integrity() == NOTHING


async def test_a_slow_reader_gets_larger_outputs_not_more(client: ProcessEngineClient) -> None:
    stream = client.generate(request("slow", params={"max_tokens": 50}))
    await anext(stream)
    await collect(client, request("fast", params={"max_tokens": 60}))
    rest = [output async for output in stream]
    assert len(rest) == 1
    assert rest[0].finish_reason is FinishReason.LENGTH


async def test_control_calls_are_answered(client: ProcessEngineClient, adapter: Path) -> None:
    ref = ref_of(adapter)
    await client.pin_adapter(ref)
    await client.load_adapter(ref)
    await until(lambda: any(entry.pinned and not entry.is_loading for entry in client.stats.resident))
    await client.unpin_adapter(ref.digest)
    await client.unload_adapter(ref.digest)
    with pytest.raises(AdapterLoadError):
        await client.load_adapter(AdapterRef("0" * 64, 1, 1))


async def test_the_engine_sees_no_secret_and_waits_passively(client: ProcessEngineClient) -> None:
    environment = Path(f"/proc/{client.pid}/environ").read_bytes().decode()
    names = {entry.partition("=")[0] for entry in environment.split("\0")}
    assert not names & SECRETS.keys()
    assert "OMP_WAIT_POLICY=passive" in environment.split("\0")
    assert "PATH" in names


async def test_an_interrupt_does_not_reach_the_engine(client: ProcessEngineClient) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGINT)
    assert len((await collect(client, request("after-interrupt")))[0]) == 8


async def test_a_killed_engine_ends_every_stream_and_comes_back_by_itself(
    client: ProcessEngineClient, adapter: Path
) -> None:
    readied: list[int | None] = []

    async def note() -> None:
        readied.append(client.pid)

    client.on_ready(note)  # called for the engine that is ready already, too
    await until(lambda: bool(readied))
    killed = client.pid
    streams = [client.generate(endless(f"stream-{index}")) for index in range(20)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    assert killed is not None
    os.kill(killed, signal.SIGKILL)

    async def drain(stream: AsyncIterator[RequestOutput]) -> None:
        async for output in stream:
            assert output.finish_reason is None

    errors = await asyncio.wait_for(
        asyncio.gather(*(drain(stream) for stream in streams), return_exceptions=True), timeout=60
    )
    assert [type(error) for error in errors] == [EngineDeadError] * 20
    await until(lambda: client.state is EngineState.RESTARTING)
    with pytest.raises(EngineDeadError, match="try again"):
        await collect(client, request("meanwhile"))
    await until(lambda: client.state is EngineState.READY)
    await until(lambda: readied == [killed, client.pid])
    assert client.pid != killed
    assert await client.integrity() == NOTHING
    assert len((await collect(client, request("again", selection=LoraSelection.single(ref_of(adapter)))))[0]) == 8


async def test_three_deaths_in_a_row_are_the_end(client: ProcessEngineClient) -> None:
    crashed = asyncio.create_task(client.crashed())
    for _ in range(2):  # one death was before
        stream = client.generate(endless("the-last"))
        await anext(stream)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGTERM)
        with pytest.raises(EngineDeadError):
            _ = [output async for output in stream]
        await until(lambda: client.state in (EngineState.READY, EngineState.STOPPED))
    report = await asyncio.wait_for(crashed, timeout=60)
    assert client.state is EngineState.STOPPED
    assert report.last_request_ids == ["the-last"]


async def test_a_step_that_raises_names_the_requests_in_the_batch(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = SourceSpec(factory="tests.engine.frontend.helpers:failing_source", options={"folders": []})
    handle = await EngineHandle.start(engine_config(model), source)
    with pytest.raises(EngineDeadError):
        _ = [output async for output in handle.session.generate(endless("poison"))]
    assert await handle.ended() == EXIT_LOOP_FAILED
    assert handle.session.last_request_ids == ["poison"]


async def test_a_failed_start_says_why_and_is_not_tried_again(model: Path) -> None:
    client = process_client(engine_config(model, kv_cache_memory_bytes=1))
    with pytest.raises(ConfigurationError, match="--kv-cache-memory-gib"):
        await client.start()
    assert client.state is EngineState.STOPPED
    assert client.pid is None


async def test_stop_lets_streams_finish_and_ends_the_process(model: Path) -> None:
    client = process_client(engine_config(model))
    await client.start()
    pid = client.pid
    finishing = asyncio.create_task(collect(client, request("finishing", params={"max_tokens": 100})))
    await until(lambda: client.stats.num_running == 1)
    await client.stop(grace_s=60)
    tokens, last = await finishing
    assert (len(tokens), last.finish_reason) == (100, FinishReason.LENGTH)
    assert client.state is EngineState.STOPPED
    assert not Path(f"/proc/{pid}").exists()


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.engine.frontend.helpers import endless, engine_config, process_client

async def main():
    client = process_client(engine_config(Path(sys.argv[1])))
    await client.start()
    stream = client.generate(endless("busy"))
    await anext(stream)
    sys.stdout.write(f"{client.pid}\\n")
    sys.stdout.flush()
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_an_engine_does_not_outlive_a_killed_parent(model: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(model), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    await until(lambda: is_gone(pid))


def is_gone(pid: int) -> bool:
    """Dead: reaped, or a zombie that only this container's init has to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
