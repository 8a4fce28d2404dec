"""The engine core over the real adapter memory: real files, loader threads, slots and host cache; fake tokens only."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection, SelectionPart
from loraplex.adapters.turns import Piece, unpaced
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore, create_engine_core
from loraplex.engine.core.request_intake import ModelLimits
from loraplex.engine.messages import LoadAdapter, PinAdapter, UnloadAdapter
from loraplex.engine.outputs import RequestOutput
from loraplex.engine.scheduler_output import RunnerOutput, SchedulerOutput
from tests.adapters.helpers import FolderSource, lora_tensors, make_manager, write_adapter
from tests.engine.core.fake_runner import VOCAB_SIZE, FakeRunner
from tests.engine.core.world import make_request, solo_tokens

NUM_ADAPTERS = 5
MISSING = AdapterRef("0" * 64, 1, 1)


@pytest.fixture
def refs_and_manager(tmp_path: Path) -> Iterator[tuple[list[AdapterRef], AdapterManager]]:
    source = FolderSource()
    refs = [
        source.add(write_adapter(tmp_path / str(i), lora_tensors(rank=4, seed=i), r=4)) for i in range(NUM_ADAPTERS)
    ]
    manager = make_manager(source, num_slots=2, copy_bytes=1 << 16)
    yield refs, manager
    manager.close()


def make_core(manager: AdapterManager, runner: FakeRunner | None = None) -> EngineCore:
    config = EngineConfig(model="", block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    limits = ModelLimits(max_model_len=64, vocab_size=VOCAB_SIZE)
    runner = runner or FakeRunner(4)
    return create_engine_core(config=config, num_blocks=24, limits=limits, runner=runner, adapters=manager)


def run(core: EngineCore) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    deadline = time.monotonic() + 60
    while core.has_work:
        assert time.monotonic() < deadline, "it never comes to rest"
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
        assert core.integrity().faults == ()
        if core.is_stalled:
            time.sleep(0.001)  # a loader thread's turn
    return outputs


def test_more_adapters_than_slots_a_mix_a_missing_one_and_the_base(
    refs_and_manager: tuple[list[AdapterRef], AdapterManager],
) -> None:
    refs, manager = refs_and_manager
    core = make_core(manager)
    mix = LoraSelection.of([SelectionPart(refs[0], 0.5), SelectionPart(refs[1], 0.5)])
    selections = [*map(LoraSelection.single, refs), mix, BASE, LoraSelection.single(MISSING)] * 3
    requests = [make_request(f"r{i}", [i, *range(8)], selection=selection) for i, selection in enumerate(selections)]
    for request in requests:
        core.add_request(request)
    outputs = run(core)

    for request in requests:
        produced = outputs[request.request_id]
        if request.selection.refs == (MISSING,):
            assert [output.error.code for output in produced if output.error] == ["adapter_load_failed"]
        else:
            assert [token for output in produced for token in output.new_token_ids] == solo_tokens(request)
    report = core.integrity()
    held = (report.num_requests, report.num_blocks_in_use, report.num_leases, report.num_references)
    assert held == (0, 0, 0, 0)


class GatedSource(FolderSource):
    """Fetches one digest only when told to, as if its store took long."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: str | None = None
        self.gate = threading.Event()

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        if digest == self.slow:
            assert self.gate.wait(60)
        return super().fetch(digest, piece)


def test_a_cold_load_costs_the_others_no_step_and_opens_no_file_between_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, runner = GatedSource(), FakeRunner(4)
    warm, cold = (
        source.add(write_adapter(tmp_path / name, lora_tensors(rank=4, seed=seed), r=4))
        for seed, name in enumerate(("warm", "cold"))
    )
    manager = make_manager(source, num_slots=2, copy_bytes=1 << 16)
    core = make_core(manager, runner)
    core.add_request(make_request("first", selection=LoraSelection.single(warm)))
    run(core)
    opened: list[str] = []
    os_open = os.open

    def record(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(threading.current_thread().name)
        return os_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", record)
    source.slow = cold.digest
    late = make_request("late", selection=LoraSelection.single(cold))
    core.add_request(late)
    others = [
        make_request("warm", max_tokens=20, selection=LoraSelection.single(warm)),
        make_request("base", [5, 6], max_tokens=20),
    ]
    for request in others:
        core.add_request(request)
    begun = len(runner.num_tokens)
    said: dict[str, list[int]] = {"warm": [], "base": [], "late": []}
    for _ in range(20):
        for output in core.step():
            said[output.request_id] += output.new_token_ids
    assert [len(step) for step in runner.num_tokens[begun:]] == [2] * 20, "both go on in every step"
    assert [said[request.request_id] for request in others] == [solo_tokens(request) for request in others]
    assert said["late"] == []
    source.gate.set()
    outputs = run(core)
    assert [token for output in outputs["late"] for token in output.new_token_ids] == solo_tokens(late)
    assert opened, "the loader opened files"
    assert threading.current_thread().name not in opened
    manager.close()


class BusyRunner(FakeRunner):
    """Knows when it computes, and takes its time."""

    is_computing = False

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        self.is_computing = True
        time.sleep(0.002)
        results = super().execute(output)
        self.is_computing = False
        return results


class WatchingSource(FolderSource):
    """Computes a lot for each fetch, and remembers whether a step ran meanwhile."""

    def __init__(self, runner: BusyRunner) -> None:
        super().__init__()
        self.runner = runner
        self.met_a_step: list[bool] = []

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        for _ in range(30):
            with piece():
                before = self.runner.is_computing
                time.sleep(0.0002)
                self.met_a_step.append(before or self.runner.is_computing)
        return super().fetch(digest, piece)


def test_no_piece_of_a_load_is_worked_on_while_a_step_computes(tmp_path: Path) -> None:
    runner = BusyRunner(4)
    source = WatchingSource(runner)
    cold = source.add(write_adapter(tmp_path / "cold", lora_tensors(rank=4), r=4))
    manager = make_manager(source, num_slots=2)
    core = make_core(manager, runner)
    late = make_request("late", selection=LoraSelection.single(cold))
    for request in (make_request("base", [5, 6], max_tokens=40), late):
        core.add_request(request)
    outputs = run(core)
    assert [token for output in outputs["late"] for token in output.new_token_ids] == solo_tokens(late)
    assert source.met_a_step == [False] * 30
    manager.close()


def test_control_calls_between_requests(refs_and_manager: tuple[list[AdapterRef], AdapterManager]) -> None:
    refs, manager = refs_and_manager
    core = make_core(manager)
    core.handle(LoadAdapter(1, refs[0]))
    core.handle(LoadAdapter(2, MISSING))
    run(core)
    core.handle(PinAdapter(3, refs[1]))
    core.handle(PinAdapter(4, refs[2]))
    run(core)
    core.add_request(make_request("r", selection=LoraSelection.single(refs[3])))
    core.handle(UnloadAdapter(5, refs[3].digest))
    run(core)

    codes = {reply.call_id: reply.error and reply.error.code for reply in core.take_replies()}
    assert codes == {1: None, 2: "adapter_load_failed", 3: None, 4: "adapter_never_fits", 5: None}
    assert [entry.digest for entry in core.stats().resident] == [refs[1].digest]
    assert core.integrity().num_leases == core.integrity().num_references == 0
