"""Builds the LoRA layout of a step on the host, in time linear in its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.lora.metadata import ChunkGroup, LoRAMeta, SelectionSlots, SlotTable, WeightedSlot

# A selection that fills this many chunks gets a group of its own, which reads its A and B once for all of them.
_CHUNKS_FOR_OWN_GROUP = 3
# Bounds the copies of A and B that a group of several selections gathers.
_SLOTS_OF_A_GROUP = 64


def build_lora_meta(
    token_selection: NDArray[np.int32],
    selections: Sequence[SelectionSlots],
    *,
    device: torch.device,
    chunk_size: int,
) -> LoRAMeta | None:
    """Lay out the tokens of a step by selection; None when no token has one.

    Args:
        token_selection: [num_tokens], index into `selections`, -1 = base.
        selections: the slots of each selection of the step.
        device: where the tensors go.
        chunk_size: most tokens in a chunk, the backend's `lora_chunk_size`.
    """
    order = np.argsort(token_selection, kind="stable")
    order = order[np.searchsorted(token_selection[order], 0) :]  # the base's -1 sort first
    if order.size == 0:
        return None
    num_slots = np.array([len(each.attention) + len(each.mlp) for each in selections], dtype=np.int64)
    chunks = _Chunks.cut(token_selection[order], chunk_size).largest_first(num_slots)
    return LoRAMeta(
        token_selection=_to(token_selection, np.int32, device),
        token_order=_to(order, np.int64, device),
        chunk_selection=_to(chunks.selection, np.int32, device),
        chunk_start=_to(chunks.start, np.int32, device),
        chunk_len=_to(chunks.length, np.int32, device),
        attention=_slot_table([each.attention for each in selections], chunks, order, device),
        mlp=_slot_table([each.mlp for each in selections], chunks, order, device),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunks:
    """Chunks of at most `size` consecutive sorted tokens of one selection."""

    selection: NDArray[np.int64]  # each [num_chunks]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    size: int

    @classmethod
    def cut(cls, sorted_selection: NDArray[np.int32], size: int) -> _Chunks:
        selection, first, count = np.unique(sorted_selection, return_index=True, return_counts=True)
        num_chunks = -(-count // size)
        segment = np.repeat(np.arange(len(selection)), num_chunks)
        offset = size * (np.arange(len(segment)) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks))
        length = np.minimum(count[segment] - offset, size)
        return cls(
            selection=selection[segment].astype(np.int64), start=first[segment] + offset, length=length, size=size
        )

    def largest_first(self, num_slots: NDArray[np.int64]) -> _Chunks:
        """By the slots of their selections: threads that take them one by one then finish at about the same time."""
        order = np.argsort(-num_slots[self.selection], kind="stable")
        return _Chunks(
            selection=self.selection[order], start=self.start[order], length=self.length[order], size=self.size
        )


def _slot_table(
    slots: Sequence[tuple[WeightedSlot, ...]], chunks: _Chunks, order: NDArray[np.int64], device: torch.device
) -> SlotTable:
    num_slots = np.array([len(each) for each in slots], dtype=np.int64)
    table = np.full((len(slots), int(num_slots.max())), -1, dtype=np.int64)
    weight = np.zeros(table.shape, dtype=np.float32)
    for selection, each in enumerate(slots):
        table[selection, : len(each)] = [slot.slot_id for slot in each]
        weight[selection, : len(each)] = [slot.weight for slot in each]
    return SlotTable(
        slot_table=_to(table, np.int32, device),
        slot_weight=_to(weight, np.float32, device),
        groups=_LazyGroups(
            lambda: tuple(
                _chunk_group(members, chunks, order, table[:, :width], weight[:, :width], device)
                for members, width in _grouped(chunks.selection, num_slots)
            )
        ),
    )


class _LazyGroups:
    """Built when they are first asked for, which only the reference backend does."""

    def __init__(self, build: Callable[[], tuple[ChunkGroup, ...]]) -> None:
        self._build = build

    @cached_property
    def _groups(self) -> tuple[ChunkGroup, ...]:
        return self._build()

    def __iter__(self) -> Iterator[ChunkGroup]:
        return iter(self._groups)


def _grouped(
    chunk_selection: NDArray[np.int64], num_slots: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Chunk indices and their number of slots: a selection with many chunks apart, the rest by number of slots."""
    chunk_slots = num_slots[chunk_selection]
    is_apart = np.bincount(chunk_selection)[chunk_selection] >= _CHUNKS_FOR_OWN_GROUP
    for selection in np.unique(chunk_selection[is_apart & (chunk_slots > 0)]):
        yield np.flatnonzero(chunk_selection == selection), int(num_slots[selection])
    for width in np.unique(chunk_slots[~is_apart & (chunk_slots > 0)]):
        members = np.flatnonzero(~is_apart & (chunk_slots == width))
        num_groups = -(-len(members) * width // _SLOTS_OF_A_GROUP)
        for part in np.array_split(members, min(num_groups, len(members))):
            yield part, int(width)


def _chunk_group(
    members: NDArray[np.int64],
    chunks: _Chunks,
    order: NDArray[np.int64],
    table: NDArray[np.int64],
    weight: NDArray[np.float32],
    device: torch.device,
) -> ChunkGroup:
    place = np.arange(chunks.size)
    is_kept = place < chunks.length[members, None]
    if len(members) == 1:  # a batched product of one member takes another path and rounds otherwise
        members = np.repeat(members, 2)
        is_kept = np.stack((is_kept[0], np.zeros_like(is_kept[0])))
    rows = order[chunks.start[members, None] + np.where(is_kept, place, 0)]
    selection = chunks.selection[members]
    if (selection == selection[0]).all():
        selection = selection[:1]
    kept = np.flatnonzero(is_kept)
    return ChunkGroup(
        rows=_to(rows.ravel(), np.int64, device),
        kept=_to(kept, np.int64, device),
        tokens=_to(rows.ravel()[kept], np.int64, device),
        slots=_to(table[selection], np.int64, device),
        weight=_to(weight[selection], np.float32, device),
        num_chunks=len(members),
    )


def _to(array: NDArray[np.generic], dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=dtype)).to(device)
