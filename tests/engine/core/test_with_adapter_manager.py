"""The engine core over the real adapter memory: real files, loader threads, slots and host cache; fake tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection, SelectionPart
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore, create_engine_core
from loraplex.engine.core.request_intake import ModelLimits
from loraplex.engine.messages import LoadAdapter, PinAdapter, UnloadAdapter
from loraplex.engine.outputs import RequestOutput
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


def make_core(manager: AdapterManager) -> EngineCore:
    config = EngineConfig(model="", block_size=4, max_num_seqs=6, max_num_batched_tokens=24)
    limits = ModelLimits(max_model_len=64, vocab_size=VOCAB_SIZE)
    return create_engine_core(config=config, num_blocks=24, limits=limits, runner=FakeRunner(4), adapters=manager)


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
