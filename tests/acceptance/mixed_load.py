"""200 requests over 24 adapters and mixes of two through 16 slots, a third of the clients leaving midway.

    python -m tests.acceptance.mixed_load [--model DIR] [--requests N] [--tokens N]

Every finished answer must equal the same request served alone (a differing token only where the solo run's two best
logits lie within 1e-4), nothing may be left over, and `/livez` answers all the while. Without --model a tiny random
base is made. Exits 1 on any fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from tests.e2e.server import Server, bearer, is_clean, running_server
from tests.helpers import make_adapter, make_checkpoint

RANKS = (1, 2, 4, 7, 8, 8, 12, 16, 16, 24, 24, 32, 32, 33, 40, 40, 48, 48, 56, 56, 64, 64, 64, 64)
NUM_SLOTS = 16
SLOT_RANK = 8
TIE = 1e-4
ADAPTER_STD = 0.05
PROBE = """
import http.client, json, select, sys, time, urllib.parse
connection, latencies = http.client.HTTPConnection(urllib.parse.urlsplit(sys.argv[1]).netloc), []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    started = time.monotonic()
    connection.request("GET", "/livez")
    response = connection.getresponse()
    assert response.status == 200 and response.read(), response.status
    latencies.append(time.monotonic() - started)
print(json.dumps(latencies))
"""


@dataclass(slots=True, kw_only=True)
class Load:
    """One request, what it runs through, and what came of it."""

    prompt: list[int]
    parts: list[tuple[str, float]]
    leaves_after: int | None  # chunks; None = stays to the end
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False

    @property
    def lora(self) -> list[dict[str, Any]] | None:
        return [{"name": name, "weight": weight} for name, weight in self.parts] or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=24)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        model = arguments.model or make_checkpoint(root / "model", vocab_size=512, max_position_embeddings=512)
        adapters = {
            f"a{index}": make_adapter(root / f"a{index}", model, seed=index, std=ADAPTER_STD, r=rank, lora_alpha=rank)
            for index, rank in enumerate(RANKS)
        }
        num_slots = sum(slots_of(name) for name in adapters)
        ranks = f"ranks {min(RANKS)} to {max(RANKS)}"
        say(f"{len(adapters)} adapters of {ranks}: {num_slots} slots; {NUM_SLOTS} in the server")
        loads = make_loads(arguments.requests)
        flags = ("--skip-tokenizer-init", "--adapter-slots", str(NUM_SLOTS), "--max-model-len", "256")
        with running_server(model, root / "data", *flags, "--kv-cache-memory-gib", "0.3") as server:
            faults = serve(server, adapters, loads, arguments.tokens)
        faults += compare(loads, model, adapters, arguments.tokens)
    say(f"{len(faults)} faults" + "".join(f"\n  {fault}" for fault in faults))
    return 1 if faults else 0


def make_loads(count: int) -> list[Load]:
    rng = random.Random(4)
    return [
        Load(
            prompt=[rng.randrange(3, 500) for _ in range(rng.randrange(4, 60))],
            parts=make_parts(rng),
            leaves_after=rng.randrange(0, 8) if number % 3 == 0 else None,
        )
        for number in range(count)
    ]


def make_parts(rng: random.Random) -> list[tuple[str, float]]:
    """A tenth base, a fifth mixes of two that fit, the rest single adapters."""
    kind = rng.random()
    if kind < 0.1:
        return []
    if kind < 0.8:
        return [(f"a{rng.randrange(len(RANKS))}", 1.0)]
    while True:
        names = [f"a{index}" for index in rng.sample(range(len(RANKS)), 2)]
        if sum(slots_of(name) for name in names) <= NUM_SLOTS:
            return [(name, round(rng.uniform(0.2, 1.2), 2)) for name in names]


def slots_of(name: str) -> int:
    return -(-RANKS[int(name[1:])] // SLOT_RANK)


def serve(server: Server, adapters: dict[str, Path], loads: list[Load], num_tokens: int) -> list[str]:
    client = server.create_tenant("load")
    for name, folder in adapters.items():
        server.upload("load", name, folder)
    key = client.headers["authorization"].removeprefix("Bearer ")
    started = time.monotonic()
    latencies = asyncio.run(send_all(server.url, key, loads, num_tokens))
    seconds = time.monotonic() - started
    finished = [load for load in loads if load.is_finished]
    say(f"{len(loads)} requests in {seconds:.1f} s: {len(finished)} finished, {len(loads) - len(finished)} left midway")
    p99 = statistics.quantiles(latencies, n=100)[98]
    say(f"/livez, {len(latencies)} probes: P99 {p99 * 1000:.0f} ms, worst {max(latencies) * 1000:.0f} ms")
    faults = [f"{load.parts} did not finish" for load in loads if load.leaves_after is None and not load.is_finished]
    report = server.integrity()
    for _ in range(100):
        if is_clean(report):
            break
        time.sleep(0.05)
        report = server.integrity()
    say(f"integrity: {report}")
    return faults + ([] if is_clean(report) else [f"left over: {report}"])


async def send_all(url: str, key: str, loads: list[Load], num_tokens: int) -> list[float]:
    limits = httpx.Limits(max_connections=None)
    with probing(url) as latencies:
        async with httpx.AsyncClient(base_url=url, headers=bearer(key), timeout=600, limits=limits) as client:
            await asyncio.gather(*(send(client, load, num_tokens) for load in loads))
    return latencies


@contextmanager
def probing(url: str) -> Iterator[list[float]]:
    """Seconds of each probe, filled at the end; from a process of its own, which waits for nobody but the server."""
    latencies: list[float] = []
    probe = subprocess.Popen(
        [sys.executable, "-c", PROBE, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield latencies
    output, _ = probe.communicate("")
    latencies += json.loads(output)


async def send(client: httpx.AsyncClient, load: Load, num_tokens: int) -> None:
    body = {"prompt": load.prompt, "lora": load.lora, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "logprobs": 1}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise SystemExit(f"{response.status_code}: {(await response.aread())[:500]!r}")
        num_chunks = 0
        async for line in response.aiter_lines():
            if load.leaves_after is not None and num_chunks >= load.leaves_after:
                return  # closes the connection
            if line.startswith("data: {"):
                num_chunks += 1
                read_chunk(json.loads(line[6:]), load)


def read_chunk(chunk: dict[str, Any], load: Load) -> None:
    assert "error" not in chunk, chunk
    for choice in chunk["choices"]:
        tokens = (choice["logprobs"] or {}).get("tokens", [])
        load.token_ids += [int(token.removeprefix("token_id:")) for token in tokens]
        load.is_finished = choice["finish_reason"] is not None


def compare(loads: Sequence[Load], model: Path, adapters: dict[str, Path], num_tokens: int) -> list[str]:
    """Serve every finished request again, each alone in the engine."""
    llm = LLM(model, adapters=adapters, skip_tokenizer_init=True, dtype="float32", adapter_slots=NUM_SLOTS,
              max_model_len=256, kv_cache_memory_bytes=1 << 28, num_threads=1)  # fmt: skip
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=2)
    faults, ties = [], 0
    finished = [load for load in loads if load.is_finished]
    for load in finished:
        solo = llm.generate([load.prompt], params, llm.mix(load.parts))[0].outputs[0]
        for position, (got, expected) in enumerate(zip(load.token_ids, solo.token_ids, strict=True)):
            if got != expected:
                (_, best), (_, second) = solo.logprobs[position].top[:2]
                ties += best - second <= TIE
                if best - second > TIE:
                    faults.append(f"{load.parts}: token {position} is {got}, alone {expected} by {best - second:.1e}")
                break
    distinct = len({tuple(load.token_ids) for load in finished})
    say(f"{len(finished)} answers ({distinct} distinct) compared with solo runs: {len(faults)} differ, {ties} at a tie")
    return faults


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
