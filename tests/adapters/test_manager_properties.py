"""The manager under random requests, aborts, pins, unloads and failing reads: no leak, nobody else's weights."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import NeverFitsError
from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.ref import AdapterRef, LoraSelection, SelectionPart
from loraplex.adapters.residency import Residency
from loraplex.adapters.turns import Piece, unpaced
from loraplex.adapters.weights import AdapterWeights
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import QV, FolderSource, lora_tensors, make_base_spec, make_manager, write_adapter

SMALL = make_base_spec(num_layers=1, hidden=8, kv=8, intermediate=8)
NUM_SLOTS, SLOT_RANK, HOST_BYTES, COPY_BYTES = 4, 2, 2_000, 200
SHAPES = ((2, QV), (2, (Projection.DOWN,)), (2, tuple(Projection)), (4, QV), (6, tuple(Projection)), (8, QV))
NUM_STEPS = 120


class GatedSource(FolderSource):
    """Reads end only while the gate is open; digests in `broken` fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.broken: set[str] = set()

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        assert self.gate.wait(60)
        if digest in self.broken:
            raise OSError("the store is gone")
        return super().fetch(digest, piece)


class Adapters:
    """What every run shares: the folders, their references and what they hold."""

    def __init__(self, folder: Path) -> None:
        self.folders: dict[str, Path] = {}
        self.refs: list[AdapterRef] = []
        self.weights: dict[str, AdapterWeights] = {}
        source = FolderSource()
        for index, (rank, projections) in enumerate(SHAPES):
            tensors = lora_tensors(rank=rank, projections=projections, seed=index, base=SMALL)
            self.refs.append(source.add(write_adapter(folder / str(index), tensors, r=rank), slot_rank=2, base=SMALL))
            self.weights[self.refs[-1].digest] = load_weights(folder / str(index), SMALL)
        self.folders = source.folders


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


class Server:
    """A scheduler in miniature: a queue whose head acquires, holders that end, are preempted or fail."""

    def __init__(self, adapters: Adapters, seed: int) -> None:
        self.random = random.Random(seed)
        self.adapters = adapters
        self.source = GatedSource()
        self.source.folders = adapters.folders
        self.manager = make_manager(
            self.source,
            num_slots=NUM_SLOTS,
            slot_rank=SLOT_RANK,
            host_bytes=HOST_BYTES,
            copy_bytes=COPY_BYTES,
            base=SMALL,
        )
        self.waiting: list[LoraSelection] = []
        self.holding: list[LoraSelection] = []

    def close(self) -> None:
        self.source.gate.set()
        self.manager.close()

    def step(self) -> None:
        actions = {
            self.accept: 4,
            self.acquire_for_the_head: 6,
            self.end_or_preempt: 3,
            self.finish_reads: 4,
            self.advance: 12,
            self.break_or_mend: 1,
            self.pin: 1,
            self.unpin: 2,
            self.load: 1,
            self.unload: 1,
        }
        self.random.choices(list(actions), list(actions.values()))[0]()
        self.check()

    def any_ref(self) -> AdapterRef:
        return self.random.choice(self.adapters.refs)

    def accept(self) -> None:
        refs = self.random.sample(self.adapters.refs, self.random.choice([1, 1, 1, 2, 3]))
        selection = LoraSelection.of(SelectionPart(ref, self.random.choice([1.0, 0.5, -2.0])) for ref in refs)
        with suppress(NeverFitsError):
            self.manager.check_fits(selection)
            self.manager.add_reference(selection)
            self.waiting.append(selection)
            self.manager.prefetch(selection)

    def acquire_for_the_head(self) -> None:
        if not self.waiting:
            return
        before = self.manager.resident()
        if self.manager.acquire(self.waiting[0]) is not Residency.NO_ROOM:
            self.holding.append(self.waiting.pop(0))
        else:
            assert self.manager.resident() == before
            assert self.holding, "an idle server has room for everything that it accepted"

    def end_or_preempt(self) -> None:
        if not self.holding:
            return
        selection = self.holding.pop(self.random.randrange(len(self.holding)))
        self.manager.release(selection)
        if self.random.random() < 0.3:
            self.waiting.insert(0, selection)
        else:
            self.manager.drop_reference(selection)

    def finish_reads(self) -> None:
        self.source.gate.set()
        wait(list(self.manager._loader._futures.values()), timeout=60)
        self.source.gate.clear()

    def advance(self) -> None:
        for failure in self.manager.advance():
            assert "the store is gone" in failure.error.message or "are not pinned" in failure.error.message
            for selection in [held for held in self.holding if failure.digest in digests(held)]:
                self.holding.remove(selection)
                self.manager.release(selection)
                self.manager.drop_reference(selection)

    def break_or_mend(self) -> None:
        self.source.broken ^= {self.any_ref().digest}

    def pin(self) -> None:
        with suppress(NeverFitsError):
            self.manager.pin(self.any_ref())

    def unpin(self) -> None:
        self.manager.unpin(self.any_ref().digest)

    def load(self) -> None:
        with suppress(NeverFitsError):
            self.manager.load(self.any_ref())

    def unload(self) -> None:
        digest = self.any_ref().digest
        is_used = any(digest in digests(selection) for selection in [*self.holding, *self.waiting])
        assert self.manager.unload(digest) is not is_used
        assert is_used or not self.manager.is_loaded(digest)

    def settle(self) -> None:
        while self.manager.has_pending_loads:
            self.finish_reads()
            self.advance()

    def check(self) -> None:
        assert self.manager.check_integrity() == []
        assert self.manager.num_leases == sum(len(selection.parts) for selection in self.holding)
        assert self.manager.stats.host_bytes <= HOST_BYTES
        for selection in self.holding:
            if self.manager.is_resident(selection):
                self.check_weights(selection)

    def check_weights(self, selection: LoraSelection) -> None:
        """The published slots hold exactly the selection's parts, in order."""
        pools, slots = self.manager._loads._tensors.pools, self.manager.slots(selection)
        attention, mlp = iter(slots.attention), iter(slots.mlp)
        for part in selection.parts:
            own_attention = [next(attention) for _ in range(part.ref.num_attention_slots)]
            own_mlp = [next(mlp) for _ in range(part.ref.num_mlp_slots)]
            assert {slot.weight for slot in own_attention + own_mlp} == {part.weight}
            for module in self.adapters.weights[part.ref.digest].modules:
                ids = [slot.slot_id for slot in (own_attention if module.projection.is_attention else own_mlp)]
                rows_a = torch.cat([pools.lora_a[module.projection][0, i] for i in ids])
                rows_b = torch.cat([pools.lora_b[module.projection][0, i] for i in ids])
                assert torch.equal(rows_a[: module.rank], module.lora_a)
                assert torch.equal(rows_b[: module.rank], module.lora_b.t())
                assert torch.count_nonzero(rows_a[module.rank :]) == 0
                assert torch.count_nonzero(rows_b[module.rank :]) == 0
        assert not [*attention, *mlp]

    def everybody_leaves(self) -> None:
        """Then nothing is held, and everything that can be read can be served and unloaded."""
        self.source.broken.clear()
        for selection in self.holding:
            self.manager.release(selection)
        for selection in [*self.holding, *self.waiting]:
            self.manager.drop_reference(selection)
        self.holding, self.waiting = [], []
        for ref in self.adapters.refs:
            self.manager.unpin(ref.digest)
        self.settle()
        assert (self.manager.num_leases, self.manager.num_references) == (0, 0)
        for ref in self.adapters.refs:
            selection = LoraSelection.single(ref)
            assert self.manager.acquire(selection) is not Residency.NO_ROOM
            self.settle()
            self.check_weights(selection)
            self.manager.release(selection)
            assert self.manager.unload(ref.digest)
        assert self.manager.resident() == ()
        assert self.manager.stats.host_bytes == 0
        self.check()


def digests(selection: LoraSelection) -> Iterator[str]:
    return (ref.digest for ref in selection.refs)


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_nothing_leaks_and_nobody_gets_anothers_weights(adapters: Adapters, seed: int) -> None:
    server = Server(adapters, seed)
    with closing(server):
        for _ in range(NUM_STEPS):
            server.step()
        server.everybody_leaves()
