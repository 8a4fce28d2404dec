"""Worlds for the adapters' tests: the tiny base's shapes, hand-made adapter folders, a source of folders."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import save_file

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.digest import folder_digest
from loraplex.adapters.errors import AdapterLoadError, AdapterRefusedError, Reason
from loraplex.adapters.folder_reader import FolderReader
from loraplex.adapters.inspection import AdapterFacts, inspect_adapter
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.residency import LoadFailure
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.adapters.turns import Piece, unpaced
from loraplex.kernels.lora.metadata import Projection

Array = npt.NDArray[np.generic]
PREFIX = "base_model.model."
QV = (Projection.Q, Projection.V)


def make_base_spec(*, num_layers: int = 2, hidden: int = 128, kv: int = 64, intermediate: int = 256) -> BaseSpec:
    """The shapes of `tests.helpers.TINY_LLAMA`."""
    q, k, v, o, gate, up, down = Projection
    return BaseSpec(
        digest="ba" * 32,
        name="tiny",
        num_layers=num_layers,
        hidden_size=hidden,
        vocab_size=128,
        in_features={q: hidden, k: hidden, v: hidden, o: hidden, gate: hidden, up: hidden, down: intermediate},
        out_features={q: hidden, k: kv, v: kv, o: hidden, gate: intermediate, up: intermediate, down: hidden},
        has_bias=dict.fromkeys(Projection, False),
        tie_word_embeddings=False,
    )


BASE = make_base_spec()


def lora_tensors(
    *, rank: int = 8, projections: tuple[Projection, ...] = tuple(Projection), seed: int = 0, base: BaseSpec = BASE
) -> dict[str, Array]:
    """Random float32 pairs for the projections of every layer, named as PEFT names them."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Array] = {}
    for module in base.modules():
        if module.projection in projections:
            name = PREFIX + module.path
            tensors[f"{name}.lora_A.weight"] = random.normal(size=(rank, module.in_features)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(size=(module.out_features, rank)).astype(np.float32)
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, Array] | None = None, /, **config: object) -> Path:
    """Save tensors (plain rank 8 on everything by default) and a config of LORA, r=8, alpha=16."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    save_file(dict(lora_tensors() if tensors is None else tensors), folder / "adapter_model.safetensors")
    return folder


def inspect(
    folder: Path, *, base: BaseSpec = BASE, max_lora_rank: int = 64, slot_rank: int = 8, num_slots: int = 8
) -> AdapterFacts:
    return inspect_adapter(folder, base, max_lora_rank=max_lora_rank, slot_rank=slot_rank, num_slots=num_slots)


def refusal(act: Callable[[], object]) -> tuple[Reason, ...]:
    """The reasons with which `act` is refused."""
    try:
        act()
    except AdapterRefusedError as error:
        return error.reasons
    raise AssertionError("was not refused")


def messages(reasons: tuple[Reason, ...]) -> str:
    return "\n".join(reason.message for reason in reasons)


def make_ref(folder: Path, *, slot_rank: int = 4, base: BaseSpec = BASE) -> AdapterRef:
    facts = inspect(folder, base=base, slot_rank=slot_rank, num_slots=64)
    return AdapterRef(folder_digest(folder), facts.num_attention_slots, facts.num_mlp_slots)


class FolderSource:
    """Serves local folders by digest and counts the reads."""

    def __init__(self) -> None:
        self.folders: dict[str, Path] = {}
        self.num_fetches = 0

    def add(self, folder: Path, *, slot_rank: int = 4, base: BaseSpec = BASE) -> AdapterRef:
        ref = make_ref(folder, slot_rank=slot_rank, base=base)
        self.folders[ref.digest] = folder
        return ref

    def fetch(self, digest: str, piece: Piece = unpaced) -> Path:
        self.num_fetches += 1
        if digest not in self.folders:
            raise AdapterLoadError(f"no files for {digest}")
        return self.folders[digest]


def make_manager(
    source: FolderSource,
    *,
    num_slots: int = 4,
    slot_rank: int = 4,
    host_bytes: int = 1 << 30,
    copy_bytes: int = 8 << 20,
    base: BaseSpec = BASE,
) -> AdapterManager:
    tensors = SlotTensors.allocate(base, num_slots=num_slots, slot_rank=slot_rank, dtype=torch.float32, device="cpu")
    return AdapterManager(FolderReader(base, source), tensors, host_memory_bytes=host_bytes, max_copy_bytes=copy_bytes)


def settle(manager: AdapterManager) -> list[LoadFailure]:
    """Advance until nothing is on its way."""
    failures: list[LoadFailure] = []
    while manager.has_pending_loads:
        failures += manager.advance()
        time.sleep(0.001)  # a loader thread's turn
    return failures
