"""A client of OpenAI's streaming completions that costs next to nothing, since it shares the cores with the server.

Every server is measured with it. Standard library only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.request_set import BenchRequest
from benchmarks.runners.runner import Outcome

COMPLETIONS = "/v1/completions"
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Timing:
    num_tokens: int
    first_token_s: float
    inter_token_s: float  # mean over the answer: events may hold several tokens


def run_streams(
    port: int, requests: list[BenchRequest], *, num_streams: int, extra: Callable[[BenchRequest], Body], key: str = ""
) -> Outcome:
    """Ask all `requests`, `num_streams` at a time, in order; `extra` is what a server wants in the body besides."""
    timings = asyncio.run(_ask_all(port, requests, num_streams, extra, key))
    return Outcome(
        num_tokens=sum(timing.num_tokens for timing in timings),
        first_token_s=[timing.first_token_s for timing in timings],
        inter_token_s=[timing.inter_token_s for timing in timings],
    )


async def _ask_all(
    port: int, requests: list[BenchRequest], num_streams: int, extra: Callable[[BenchRequest], Body], key: str
) -> list[_Timing]:
    waiting = iter(requests)

    async def ask_in_turn() -> list[_Timing]:
        return [await _ask(port, stream_body(request) | extra(request), key) for request in waiting]

    streams = await asyncio.gather(*(ask_in_turn() for _ in range(num_streams)))
    return [timing for stream in streams for timing in stream]


def stream_body(request: BenchRequest) -> Body:
    return {
        "prompt": request.prompt_token_ids,
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def _ask(port: int, body: Body, key: str) -> _Timing:
    asked = time.perf_counter()
    arrivals: list[float] = []
    num_tokens = 0
    async for event in stream_events(port, body, key):
        if event.get("choices"):
            arrivals.append(time.perf_counter())
        if event.get("usage"):
            num_tokens = event["usage"]["completion_tokens"]
    if not arrivals:
        raise RuntimeError("a stream ended without a token")
    between = (arrivals[-1] - arrivals[0]) / max(1, num_tokens - 1)
    return _Timing(num_tokens, arrivals[0] - asked, between)


async def stream_events(port: int, body: Body, key: str) -> AsyncIterator[dict[str, Any]]:
    """The events of one answer. Raises RuntimeError when the server refuses."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_head(port, len(content), key) + content)
        status = await reader.readline()
        is_chunked = await _read_headers(reader)
        if b" 200 " not in status:
            raise RuntimeError(f"{status.decode().strip()}: {(await reader.read(2000)).decode(errors='replace')}")
        async for line in _lines(reader, is_chunked=is_chunked):
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                yield json.loads(line[5:])
    finally:
        writer.close()


def _head(port: int, length: int, key: str) -> bytes:
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *([f"Authorization: Bearer {key}"] if key else []),
    ]
    return "".join(line + "\r\n" for line in [*lines, ""]).encode()


async def _read_headers(reader: asyncio.StreamReader) -> bool:
    """Whether the body comes in chunks."""
    is_chunked = False
    while (line := await reader.readline()).strip():
        is_chunked |= line.lower().startswith(b"transfer-encoding:") and b"chunked" in line.lower()
    return is_chunked


async def _lines(reader: asyncio.StreamReader, *, is_chunked: bool) -> AsyncIterator[bytes]:
    if not is_chunked:
        while line := await reader.readline():
            yield line
        return
    rest = b""
    while size := int(await reader.readline(), 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)  # the chunk's own end of line
        for line in lines:
            yield line
