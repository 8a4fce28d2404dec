"""Engines for the frontend's tests: a tiny checkpoint, behind a process boundary or in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from loraplex.adapters.source import AdapterSource
from loraplex.engine.config import EngineConfig
from loraplex.engine.frontend.engine_client import ProcessEngineClient
from loraplex.engine.frontend.local_source import create_local_source
from loraplex.engine.frontend.protocol import EngineClient
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.outputs import RequestOutput
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.sampling_params import SamplingParams

MAX_POSITIONS = 8192  # long enough that a stream cannot end while a test looks at it
LOCAL_SOURCE = "loraplex.engine.frontend.local_source:create_local_source"


def engine_config(model: Path, **settings: Any) -> EngineConfig:
    small: dict[str, Any] = {
        "kv_cache_memory_bytes": 64 << 20,
        "adapter_slots": 8,
        "num_threads": 1,
        "max_model_len": MAX_POSITIONS,
    }
    return EngineConfig(model=str(model), **(small | settings))


def process_client(config: EngineConfig, *folders: Path, factory: str = LOCAL_SOURCE) -> ProcessEngineClient:
    return ProcessEngineClient(
        config, SourceSpec(factory=factory, options={"folders": [str(folder) for folder in folders]})
    )


def request(request_id: str, **fields: Any) -> GenerateRequest:
    """A greedy request that only its length ends."""
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True} | fields.pop("params", {})
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=fields.pop("prompt_token_ids", [1, 5, 9, 13]),
        sampling_params=SamplingParams(**params),
        **fields,
    )


def endless(request_id: str) -> GenerateRequest:
    return request(request_id, params={"max_tokens": MAX_POSITIONS - 10})


async def collect(client: EngineClient, generate: GenerateRequest) -> tuple[list[int], RequestOutput]:
    """All tokens of a request, and its last output."""
    async with aclosing(client.generate(generate)) as stream:
        outputs = [output async for output in stream]
    return [token_id for output in outputs for token_id in output.new_token_ids], outputs[-1]


async def until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.02)


def failing_source(folders: Sequence[str]) -> AdapterSource:
    """A source whose making breaks this process's runner: the third step of the engine raises."""
    execute, num_steps = ModelRunner.execute, 0

    def fail_at_third(self: ModelRunner, output: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise RuntimeError("boom")
        return execute(self, output)

    ModelRunner.execute = fail_at_third  # type: ignore[method-assign]  # lives and dies with the engine process
    return create_local_source(list(folders))
