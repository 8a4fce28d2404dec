"""The manager under random requests, aborts, pins, unloads and failing reads: no leak, nobody else's weights."""

from __future__ import annotations

import tempfile
import threading
from concurrent.futures import wait
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.adapters.errors import NeverFitsError
from loraplex.adapters.ref import AdapterRef, LoraSelection, SelectionPart
from loraplex.adapters.residency import Residency
from loraplex.adapters.weights import AdapterWeights, load_weights
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import QV, FolderSource, lora_tensors, make_base_spec, make_manager, write_adapter

SMALL = make_base_spec(num_layers=1, hidden=8, kv=8, intermediate=8)
NUM_SLOTS = 4
ATTENTION, MLP = QV, (Projection.DOWN,)
SHAPES = ((2, ATTENTION), (2, MLP), (2, tuple(Projection)), (4, ATTENTION), (6, tuple(Projection)), (8, MLP))


class GatedSource(FolderSource):
    """Reads end only while the gate is open; digests in `broken` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.broken: set[str] = set()

    def fetch(self, digest: str) -> Path:
        assert self.gate.wait(60)
        if digest in self.broken:
            raise OSError("the store is gone")
        return super().fetch(digest)


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.source = GatedSource()
        self.refs: list[AdapterRef] = []
        self.weights: dict[str, AdapterWeights] = {}
        for index, (rank, projections) in enumerate(SHAPES):
            tensors = lora_tensors(rank=rank, projections=projections, seed=index, base=SMALL)
            folder = write_adapter(Path(self.folder.name) / str(index), tensors, r=rank)
            ref = self.source.add(folder, slot_rank=2, base=SMALL)
            self.refs.append(ref)
            self.weights[ref.digest] = load_weights(folder, SMALL)
        self.manager = make_manager(
            self.source, num_slots=NUM_SLOTS, slot_rank=2, host_bytes=2_000, copy_bytes=200, base=SMALL
        )
        self.waiting: list[LoraSelection] = []
        self.holding: list[LoraSelection] = []

    def teardown(self) -> None:
        try:
            self.everybody_leaves()
        finally:
            self.source.gate.set()
            self.manager.close()
            self.folder.cleanup()

    def everybody_leaves(self) -> None:
        """Then nothing is held, and everything that can be read can be served."""
        self.source.broken.clear()
        for selection in self.holding:
            self.manager.release(selection)
        for selection in [*self.holding, *self.waiting]:
            self.manager.drop_reference(selection)
        for ref in self.refs:
            self.manager.unpin(ref.digest)
        self.settle()
        assert (self.manager.num_leases, self.manager.num_references) == (0, 0)
        for ref in self.refs:
            selection = LoraSelection.single(ref)
            assert self.manager.acquire(selection) is not Residency.NO_ROOM
            self.settle()
            self.check_weights(selection)
            self.manager.release(selection)
            assert self.manager.unload(ref.digest)
        assert self.manager.resident() == ()
        assert self.manager.stats.host_bytes == 0

    def settle(self) -> None:
        while self.manager.has_pending_loads:
            self.finish_reads()
            self.manager.advance()

    @rule(indices=st.lists(st.integers(0, len(SHAPES) - 1), min_size=1, max_size=3, unique=True))
    def accept(self, indices: list[int]) -> None:
        selection = LoraSelection.of(SelectionPart(self.refs[i], 0.5 + i) for i in indices)
        try:
            self.manager.check_fits(selection)
        except NeverFitsError:
            return
        self.manager.add_reference(selection)
        self.waiting.append(selection)
        self.manager.prefetch(selection)

    @precondition(lambda self: self.waiting)
    @rule()
    def acquire_for_the_head(self) -> None:
        residency = self.manager.acquire(self.waiting[0])
        if residency is not Residency.NO_ROOM:
            self.holding.append(self.waiting.pop(0))
        else:
            assert self.holding, "an idle server has room for everything that it accepted"

    @precondition(lambda self: self.holding)
    @rule(index=st.integers(0, 100), preempted=st.booleans())
    def release(self, index: int, preempted: bool) -> None:
        selection = self.holding.pop(index % len(self.holding))
        self.manager.release(selection)
        if preempted:
            self.waiting.insert(0, selection)
        else:
            self.manager.drop_reference(selection)

    @rule()
    def finish_reads(self) -> None:
        self.source.gate.set()
        wait(list(self.manager._loader._futures.values()), timeout=60)
        self.source.gate.clear()

    @rule(times=st.integers(1, 10))
    def advance(self, times: int) -> None:
        for _ in range(times):
            for failure in self.manager.advance():
                for selection in [held for held in self.holding if failure.digest in {r.digest for r in held.refs}]:
                    self.holding.remove(selection)
                    self.manager.release(selection)
                    self.manager.drop_reference(selection)

    @rule(index=st.integers(0, len(SHAPES) - 1))
    def break_or_mend(self, index: int) -> None:
        self.source.broken ^= {self.refs[index].digest}

    @rule(index=st.integers(0, len(SHAPES) - 1))
    def pin(self, index: int) -> None:
        try:
            self.manager.pin(self.refs[index])
        except NeverFitsError:
            return

    @rule(index=st.integers(0, len(SHAPES) - 1))
    def unpin(self, index: int) -> None:
        self.manager.unpin(self.refs[index].digest)

    @rule(index=st.integers(0, len(SHAPES) - 1))
    def load(self, index: int) -> None:
        try:
            self.manager.load(self.refs[index])
        except NeverFitsError:
            return

    @rule(index=st.integers(0, len(SHAPES) - 1))
    def unload(self, index: int) -> None:
        digest = self.refs[index].digest
        is_used = any(digest in {ref.digest for ref in held.refs} for held in [*self.holding, *self.waiting])
        assert self.manager.unload(digest) is not is_used
        assert is_used or not self.manager.is_loaded(digest)

    @invariant()
    def nothing_leaks(self) -> None:
        assert self.manager.check_integrity() == []
        assert self.manager.num_leases == sum(len(selection.parts) for selection in self.holding)
        assert self.manager.stats.host_bytes <= 2_000

    @invariant()
    def whoever_is_resident_has_its_own_weights(self) -> None:
        for selection in self.holding:
            if self.manager.is_resident(selection):
                self.check_weights(selection)

    def check_weights(self, selection: LoraSelection) -> None:
        pools, slots = self.manager._loads._tensors.pools, self.manager.slots(selection)
        attention, mlp = list(slots.attention), list(slots.mlp)
        for part in selection.parts:
            own_attention = [attention.pop(0) for _ in range(part.ref.num_attention_slots)]
            own_mlp = [mlp.pop(0) for _ in range(part.ref.num_mlp_slots)]
            assert {slot.weight for slot in own_attention + own_mlp} == {part.weight}
            for module in self.weights[part.ref.digest].modules:
                ids = [slot.slot_id for slot in (own_attention if module.projection.is_attention else own_mlp)]
                rows_a = torch.cat([pools.lora_a[module.projection][0, i] for i in ids])
                rows_b = torch.cat([pools.lora_b[module.projection][0, i] for i in ids])
                assert torch.equal(rows_a[: module.rank], module.lora_a)
                assert torch.equal(rows_b[: module.rank], module.lora_b.t())
                assert torch.count_nonzero(rows_a[module.rank :]) == 0
                assert torch.count_nonzero(rows_b[module.rank :]) == 0
        assert (attention, mlp) == ([], [])


ManagerMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
test_the_manager_keeps_its_promises_in_any_order = ManagerMachine.TestCase
