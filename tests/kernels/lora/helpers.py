"""Small worlds of pools, selections and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection, SelectionSlots, WeightedSlot
from loraplex.kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
BACKEND = ReferenceBackend(CPU)

QKV = (Projection.Q, Projection.K, Projection.V)
GATE_UP = (Projection.GATE, Projection.UP)
POPULARITIES = ("identical", "distinct", "uniform", "zipf", "skewed")


def create_pools(
    *,
    hidden: int = 96,
    out: Sequence[int] = (96, 32, 32),
    projections: Sequence[Projection] = QKV,
    num_slots: int = 24,
    slot_rank: int = 8,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LoRAPools:
    """Random pools for a fused linear `hidden -> sum of out`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return LoRAPools(
        lora_a={p: normal(num_layers, num_slots, slot_rank, hidden).to(dtype) for p in projections},
        lora_b={
            p: normal(num_layers, num_slots, slot_rank, n).to(dtype) for p, n in zip(projections, out, strict=True)
        },
        scaling=normal(num_layers, len(Projection), num_slots),
    )


def poison_unused_slots(pools: LoRAPools, used: Iterable[int]) -> LoRAPools:
    """The same pools with NaN in every slot that no selection names."""
    unused = sorted(set(range(pools.scaling.shape[-1])) - set(used))
    for pool in (*pools.lora_a.values(), *pools.lora_b.values()):
        pool[:, unused] = torch.nan
    pools.scaling[..., unused] = torch.nan
    return pools


def selection_of(slot_ids: Sequence[int], weights: Sequence[float] | None = None) -> SelectionSlots:
    """A selection with the same slots in both spaces."""
    slots = tuple(WeightedSlot(s, w) for s, w in zip(slot_ids, weights or [1.0] * len(slot_ids), strict=True))
    return SelectionSlots(slots, slots)


def popularity(kind: str, num_tokens: int, num_selections: int) -> list[int]:
    """The selection of every token, -1 = base. The last selection is always within reach."""
    rng = np.random.default_rng(3)
    match kind:
        case "identical":
            return [num_selections - 1] * num_tokens
        case "distinct":
            return [token % num_selections for token in range(num_tokens)]
        case "uniform":
            return [int(each) for each in rng.integers(-1, num_selections, num_tokens)]
        case "zipf":
            return [min(int(each), num_selections) - 1 for each in rng.zipf(1.5, num_tokens)]
        case _:  # skewed: one crowd, the base and a loner
            return ([0] * num_tokens + [-1, num_selections - 1])[-num_tokens:]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows, what they run through, and the base's output that the delta is added to."""

    pools: LoRAPools
    selections: Sequence[SelectionSlots]
    token_selection: Sequence[int]
    x: Tensor
    base: Tensor
    layer: int = 1

    @property
    def projections(self) -> tuple[Projection, ...]:
        return tuple(self.pools.lora_a)

    def meta(self) -> LoRAMeta | None:
        selection = np.array(self.token_selection, dtype=np.int32)
        return build_lora_meta(selection, self.selections, device=CPU, chunk_size=BACKEND.lora_chunk_size)

    def run(self) -> Tensor:
        y = self.base.clone()
        BACKEND.lora_apply(self.x, y, self.pools, layer=self.layer, projections=self.projections, meta=self.meta())
        return y

    def take(self, rows: Sequence[int]) -> Batch:
        """A batch of these rows only, in this order."""
        return Batch(
            pools=self.pools,
            selections=self.selections,
            token_selection=[self.token_selection[row] for row in rows],
            x=self.x[list(rows)],
            base=self.base[list(rows)],
            layer=self.layer,
        )


def create_batch(
    pools: LoRAPools,
    selections: Sequence[SelectionSlots],
    token_selection: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    hidden = next(iter(pools.lora_a.values())).shape[-1]
    out = sum(pool.shape[-1] for pool in pools.lora_b.values())
    return Batch(
        pools=pools,
        selections=selections,
        token_selection=token_selection,
        x=torch.randn(len(token_selection), hidden, generator=generator).to(dtype),
        base=torch.randn(len(token_selection), out, generator=generator).to(dtype),
    )
