"""What the Python around the forward pass costs a decode step: one table, milliseconds by part.

    OMP_WAIT_POLICY=passive python -m benchmarks.engine_overhead

Runs the demo model with `--running` requests, once on the base and once with `--adapters` adapters, and measures the
real functions of the engine in place: the forward pass evicts what they have in the caches, as it does when serving.
Times are exclusive: a part does not contain what is called from it and listed itself.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from benchmarks.request_set import adapter_name, ensure_adapters
from loraplex.adapters.inspection import inspect_adapter
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection
from loraplex.engine.build import build_engine_core
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.core.scheduler import Scheduler
from loraplex.engine.frontend.choice import Choice
from loraplex.engine.frontend.local_source import LocalAdapterSource
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.frontend.wire import decode_event, encode
from loraplex.engine.messages import EngineInfo, GenerateRequest, OutputBatch
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.runner import model_runner
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.runner.sampler import Sampler
from loraplex.engine.sampling_params import SamplingParams
from loraplex.kernels.cpu.backend import CpuBackend
from loraplex.platform.demo.model import ensure_demo_model

ROOT: Final = Path(__file__).parents[1]
PROMPT_LEN: Final = 96
WARM_UP_STEPS: Final = 8
FORWARD: Final = "forward pass"
API_PARTS: Final = ("decode (API process)", "detokenize (API process)")

# The functions that are measured: whose, which, and the part that they are.
ENGINE_PARTS: Final = (
    (AdapterManager, "advance", "adapters"),
    (Scheduler, "schedule", "schedule"),
    (model_runner, "build_input_batch", "input batch"),
    (DecoderModel, "forward", FORWARD),
    (DecoderModel, "compute_logits", "logits"),
    (CpuBackend, "row_maximum", "largest and finite"),
    (Sampler, "start", "sampling"),
    (ModelRunner, "execute", "rest of the runner"),
    (Scheduler, "update", "update"),
)


class Stopwatch:
    """Adds up exclusive seconds by part; `lap` gives what came together since the last one."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = [0.0]  # seconds of the parts called from each part that is open

    def measured(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return function(*args, **kwargs)

        return timed

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._inner.append(0.0)
        started = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self._seconds[name] += seconds - self._inner.pop()
            self._inner[-1] += seconds

    def lap(self) -> dict[str, float]:
        lap, self._seconds = self._seconds, defaultdict(float)
        return lap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64, help="requests in every step")
    parser.add_argument("--adapters", type=int, default=8, help="adapters that the second run spreads them over")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()
    model = ensure_demo_model(ROOT / ".demo")
    folders = ROOT / ".demo" / "bench-adapters"
    ensure_adapters(model, folders, arguments.adapters)
    watch = Stopwatch()
    for owner, name, part in ENGINE_PARTS:
        setattr(owner, name, watch.measured(getattr(owner, name), part))

    source = LocalAdapterSource()
    core, info = build_engine_core(_config(model, arguments.running, arguments.adapters), source)
    selections = [_selection(folders / adapter_name(i), source, model, info) for i in range(arguments.adapters)]
    params = SamplingParams(temperature=arguments.temperature, max_tokens=None, ignore_eos=True)
    tokenizer = Tokenizer.from_folder(model)
    laps = {
        name: _measure(core, tokenizer, watch, params, of, num_running=arguments.running, num_steps=arguments.steps)
        for name, of in (("base", [BASE]), (f"{arguments.adapters} adapters", selections))
    }
    sys.stdout.write(_table(laps, f"{arguments.running} running, {info.num_threads} threads, {info.backend}"))


def _config(model: Path, num_running: int, num_adapters: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        dtype="bfloat16",
        lora_dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=num_running,
        adapter_slots=8 * max(1, num_adapters),
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=True,
    )


def _selection(folder: Path, source: LocalAdapterSource, model: Path, info: EngineInfo) -> LoraSelection:
    facts = inspect_adapter(
        folder,
        build_base_spec(model),
        max_lora_rank=info.max_lora_rank,
        slot_rank=info.slot_rank,
        num_slots=info.num_slots,
    )
    return LoraSelection.single(AdapterRef(source.add(folder), facts.num_attention_slots, facts.num_mlp_slots))


def _measure(
    core: EngineCore,
    tokenizer: Tokenizer,
    watch: Stopwatch,
    params: SamplingParams,
    selections: list[LoraSelection],
    *,
    num_running: int,
    num_steps: int,
) -> list[dict[str, float]]:
    """Laps of the decode steps in which all requests run."""
    choices: dict[str, Choice] = {}
    for index in range(num_running):
        prompt = [(index * 131 + place * 17) % 40000 + 1000 for place in range(PROMPT_LEN)]
        request = GenerateRequest(
            request_id=f"cmpl-0123456789abcdef{index:08}.0",
            prompt_token_ids=prompt,
            sampling_params=params,
            selection=selections[index % len(selections)],
        )
        core.add_request(request)
        choices[request.request_id] = Choice(index=0, prompt_token_ids=prompt, params=params, tokenizer=tokenizer)
    laps: list[dict[str, float]] = []
    while len(laps) < num_steps + WARM_UP_STEPS:
        watch.lap()
        outputs = core.step()
        _deliver(OutputBatch(outputs), choices, watch)
        if len(outputs) == num_running:
            laps.append(watch.lap())
        elif core.is_stalled:
            time.sleep(0.001)
    core.abort(list(choices))
    core.step()
    return laps[WARM_UP_STEPS:]


def _deliver(batch: OutputBatch, choices: dict[str, Choice], watch: Stopwatch) -> None:
    with watch.part("encode"):
        message = encode(batch)
    with watch.part(API_PARTS[0]):
        event = decode_event(message)
    assert isinstance(event, OutputBatch)
    with watch.part(API_PARTS[1]):
        for output in event.outputs:
            choices[output.request_id].push(output)


def _table(laps_by_run: dict[str, list[dict[str, float]]], title: str) -> str:
    parts = list(dict.fromkeys(part for laps in laps_by_run.values() for lap in laps for part in lap))
    lines = [
        f"Median milliseconds of a decode step: {title}",
        "",
        f"{'part':<28}" + "".join(f"{n:>14}" for n in laps_by_run),
    ]
    for part in parts:
        lines.append(_row(part, [[lap.get(part, 0.0) for lap in laps] for laps in laps_by_run.values()]))
    sums = {
        "Python of the engine": [part for part in parts if part not in (FORWARD, "logits", *API_PARTS)],
        "Python of the API process": list(API_PARTS),
    }
    lines.append("")
    for name, of in sums.items():
        lines.append(_row(name, [[sum(lap.get(p, 0.0) for p in of) for lap in laps] for laps in laps_by_run.values()]))
    return "\n".join(lines) + "\n"


def _row(name: str, values_by_run: list[list[float]]) -> str:
    return f"{name:<28}" + "".join(f"{statistics.median(values) * 1000:14.3f}" for values in values_by_run)


if __name__ == "__main__":
    main()
