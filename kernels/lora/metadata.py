"""The layout of LoRA in a batch: which projections exist, where their slots lie, which rows use which slots.

A *slot* is `slot_rank` rank rows of A and B of every projection of one space in every layer. There are two
spaces, attention (q, k, v, o) and MLP (gate, up, down), so that an adapter that touches only attention takes no
MLP memory. A *selection* is what one request runs through; its row of a `slot_table` lists its slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # importable without torch, for the platform's process
    from torch import Tensor


class Projection(IntEnum):
    """The seven linear layers of a decoder layer; the value is the row in `LoRAPools.scaling`."""

    Q = 0
    K = 1
    V = 2
    O = 3  # noqa: E741 - the field's name for the output projection
    GATE = 4
    UP = 5
    DOWN = 6

    @property
    def is_attention(self) -> bool:
        return self <= Projection.O

    @property
    def module_name(self) -> str:
        return f"{self.name.lower()}_proj"


class WeightedSlot(NamedTuple):
    """A slot id with the mix weight of the adapter that holds it."""

    slot_id: int
    weight: float


class SelectionSlots(NamedTuple):
    """The slots of one resident selection in each space, in the fixed order of its parts and their rank rows."""

    attention: tuple[WeightedSlot, ...]
    mlp: tuple[WeightedSlot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAPools:
    """The pooled weights of all resident adapters.

    Rank-major on both sides: a slot is rank rows. Nothing is folded into A or B.
    """

    lora_a: Mapping[Projection, Tensor]  # each [num_layers, num_slots, slot_rank, in_features]
    lora_b: Mapping[Projection, Tensor]  # each [num_layers, num_slots, slot_rank, out_features]
    scaling: Tensor  # float32 [num_layers, len(Projection), num_slots]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Chunks whose selections have equally many slots, so that one batched product of equal shapes serves them.

    A chunk that is not full repeats its first token; those rows are computed and not kept.
    """

    rows: Tensor  # int64 [num_chunks * chunk_size]: token indices
    kept: Tensor  # int64 [num_kept]: places in `rows` that are not padding
    tokens: Tensor  # int64 [num_kept]: `rows[kept]`, each token once
    slots: Tensor  # int64 [num_chunks, num_slots], or [1, num_slots] when all chunks are of one selection
    weight: Tensor  # float32, same shape
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """The slots of every selection of a step in one space."""

    slot_table: Tensor  # int32 [num_selections, max_slots_per_selection], -1 ends a row
    slot_weight: Tensor  # float32, same shape
    groups: Iterable[ChunkGroup]  # the same, laid out for batched products; selections without slots are in none


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAMeta:
    """Per-step LoRA layout, built once on the host and shared by all layers.

    Tokens with a selection are sorted by it and cut into chunks of one selection, those with the most slots first;
    tokens without one (-1) are in no chunk, so nothing of them is ever indexed.
    """

    token_selection: Tensor  # int32 [num_tokens], -1 = base
    token_order: Tensor  # int64 [num_lora_tokens]: token indices, stable-sorted by selection
    chunk_selection: Tensor  # int32 [num_chunks]
    chunk_start: Tensor  # int32 [num_chunks]: offset into token_order
    chunk_len: Tensor  # int32 [num_chunks]
    attention: SlotTable
    mlp: SlotTable

    @property
    def num_chunks(self) -> int:
        return self.chunk_selection.shape[0]
