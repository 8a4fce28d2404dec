"""The pooled A and B of all resident adapters, and how a version's weights get into its slots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.slot_pool import Slots
from loraplex.adapters.weights import AdapterWeights, ModuleWeights
from loraplex.kernels.cpu import huge_pages
from loraplex.kernels.lora.metadata import LoRAPools, Projection

_SCALING_BYTES: Final = 4


def slot_bytes(base: BaseSpec, *, slot_rank: int, dtype: torch.dtype) -> int:
    """Bytes of one attention slot and one MLP slot together (`num_slots` = that many of each)."""
    features = sum(base.in_features[projection] + base.out_features[projection] for projection in Projection)
    return base.num_layers * (features * slot_rank * dtype.itemsize + len(Projection) * _SCALING_BYTES)


class SlotTensors:
    """Owns `pools`. A slot's rows are all written before anything reads them, zeros where the adapter has none."""

    def __init__(self, pools: LoRAPools) -> None:
        self.pools = pools

    @classmethod
    def allocate(
        cls, base: BaseSpec, *, num_slots: int, slot_rank: int, dtype: torch.dtype, device: str | torch.device
    ) -> SlotTensors:
        def pool(features: int) -> Tensor:
            shape = base.num_layers, num_slots, slot_rank, features
            return huge_pages.empty(*shape, dtype=dtype, device=torch.device(device)).zero_()

        return cls(
            LoRAPools(
                lora_a={projection: pool(base.in_features[projection]) for projection in Projection},
                lora_b={projection: pool(base.out_features[projection]) for projection in Projection},
                scaling=torch.zeros(base.num_layers, len(Projection), num_slots, device=device),
            )
        )

    @property
    def num_slots(self) -> int:
        return self.pools.scaling.shape[2]

    @property
    def slot_rank(self) -> int:
        return self.pools.lora_a[Projection.Q].shape[2]

    @property
    def num_layers(self) -> int:
        return self.pools.scaling.shape[0]

    def misfit(self, weights: AdapterWeights, slots: Slots) -> str | None:
        """What is wrong when the slots have fewer rank rows than the weights need; they would be cut off silently."""
        for space, slot_ids in (("attention", slots.attention), ("MLP", slots.mlp)):
            rank, num_rows = weights.max_rank(attention=space == "attention"), len(slot_ids) * self.slot_rank
            if rank > num_rows:
                return f"has rank {rank} in the {space} layers, but was given slots for {num_rows}"
        return None

    def write(self, weights: AdapterWeights, slots: Slots, *, max_piece_bytes: int) -> Iterator[int]:
        """Copy `weights` into `slots` piece by piece; yields the bytes of each piece after it was written.

        A piece is a number of whole rank rows, at most `max_piece_bytes` (but at least one row). The slots hold the
        adapter when the iterator is exhausted; an iterator dropped before leaves them unpublished rubbish that the
        next load overwrites.
        """
        modules = {(module.layer, module.projection): module for module in weights.modules}
        for layer in range(self.num_layers):
            for projection in Projection:
                slot_ids = slots.attention if projection.is_attention else slots.mlp
                self.pools.scaling[layer, projection, list(slot_ids)] = weights.scaling[layer, projection]
                module = modules.get((layer, projection))
                yield from self._write_module(module, layer, projection, slot_ids, max_piece_bytes)

    def _write_module(
        self,
        module: ModuleWeights | None,
        layer: int,
        projection: Projection,
        slot_ids: Sequence[int],
        max_piece_bytes: int,
    ) -> Iterator[int]:
        sides = (
            (self.pools.lora_a[projection][layer], None if module is None else module.lora_a),
            (self.pools.lora_b[projection][layer], None if module is None else module.lora_b.t()),
        )
        for pool, rows in sides:
            for index, slot_id in enumerate(slot_ids):
                slot_rows = None if rows is None else rows[index * self.slot_rank : (index + 1) * self.slot_rank]
                yield from _write_slot(pool[slot_id], slot_rows, max_piece_bytes)


def _write_slot(slot: Tensor, rows: Tensor | None, max_piece_bytes: int) -> Iterator[int]:
    """Write `rows [n <= slot_rank, features]` into `slot [slot_rank, features]`, zeros below them."""
    num_rows = 0 if rows is None else rows.shape[0]
    row_bytes = slot.shape[1] * slot.element_size()
    rows_per_piece = max(1, max_piece_bytes // row_bytes)
    for start in range(0, slot.shape[0], rows_per_piece):
        end = min(start + rows_per_piece, slot.shape[0])
        filled = min(max(num_rows, start), end)
        if rows is not None and filled > start:
            slot[start:filled].copy_(rows[start:filled])
        slot[filled:end].zero_()  # not `*= 0`: NaN would survive it
        yield (end - start) * row_bytes
