"""A manager over a folder of small adapters, and what its tests ask of it."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.adapters.residency import Residency
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.adapters.turns import Piece, unpaced
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import BASE, QV, FolderSource, lora_tensors, make_manager, settle, write_adapter


class World:
    """A source with adapters of rank 4 on q and v (one attention slot of rank 4 each), and a manager."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.source = FolderSource()
        self.managers: list[AdapterManager] = []

    def add(self, name: str, *, rank: int = 4, projections: tuple[Projection, ...] = QV) -> AdapterRef:
        tensors = lora_tensors(rank=rank, projections=projections, seed=len(self.source.folders))
        return self.source.add(write_adapter(self.tmp_path / name, tensors, r=rank))

    def manager(self, *, num_slots: int = 2, host_bytes: int = 1 << 30, copy_bytes: int = 8 << 20) -> AdapterManager:
        manager = make_manager(self.source, num_slots=num_slots, host_bytes=host_bytes, copy_bytes=copy_bytes)
        self.managers.append(manager)
        return manager


class SlowSource(FolderSource):
    """Fetches only when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        assert self.gate.wait(60)
        return super().fetch(digest, piece)


def acquire_now(manager: AdapterManager, selection: LoraSelection) -> None:
    assert manager.acquire(selection) is not Residency.NO_ROOM
    assert settle(manager) == []
    assert manager.is_resident(selection)


def tensors_of(manager: AdapterManager) -> SlotTensors:
    return manager._loads._tensors


def assert_holds(manager: AdapterManager, selection: LoraSelection, folder: Path) -> None:
    """The published slots hold exactly the folder's adapter."""
    weights, pools = load_weights(folder, BASE), tensors_of(manager).pools
    slots = manager.slots(selection)
    for module in weights.modules:
        ids = slots.attention if module.projection.is_attention else slots.mlp
        rows = torch.cat([pools.lora_a[module.projection][module.layer, slot.slot_id] for slot in ids])
        assert torch.equal(rows[: module.rank], module.lora_a)
        assert torch.count_nonzero(rows[module.rank :]) == 0


def drain(manager: AdapterManager) -> None:
    """Until prefetches have ended too, which nobody waits for."""
    for _ in range(10):
        manager.advance()
        settle(manager)
