"""The input buffers of captured decode batches: one flat block of memory that every shape lays out anew.

A captured graph reads its inputs at fixed addresses. Each shape carves its tensors out of the same two blocks, one in
page-locked host memory and its twin on the device, both as large as the largest shape needs and never reallocated. A
step writes its batch into the host's views, padding first, and one copy moves as many bytes as the shape has.

Padding is harmless: a padded sequence has length 0 and stores its key nowhere (`slot_mapping` -1), a padded chunk has
the selection -1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loraplex.engine.runner.input_batch import InputBatch
from loraplex.kernels.attention.metadata import AttentionMeta
from loraplex.kernels.lora.metadata import LoRAMeta, SlotTable

_ALIGNMENT = 16  # bytes; kernels are specialised on it


class GraphShape(NamedTuple):
    """What a captured batch has room for."""

    num_seqs: int
    max_seq_len: int
    table_width: int  # slots of a selection in each space; 0 = without adapters


class _Field(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    padding: float


def _fields(shape: GraphShape, block_size: int) -> dict[str, _Field]:
    num_seqs, table = shape.num_seqs, (shape.num_seqs, shape.table_width)
    fields = {
        "input_ids": _Field(torch.int64, (num_seqs,), 0),
        "positions": _Field(torch.int64, (num_seqs,), 0),
        "slot_mapping": _Field(torch.int64, (num_seqs,), -1),
        "seq_lens": _Field(torch.int32, (num_seqs,), 0),
        "query_start_loc": _Field(torch.int32, (num_seqs + 1,), 0),
        "block_table": _Field(torch.int32, (num_seqs, -(-shape.max_seq_len // block_size)), -1),
    }
    if shape.table_width:
        fields |= {
            "token_order": _Field(torch.int64, (num_seqs,), 0),
            "token_selection": _Field(torch.int32, (num_seqs,), -1),
            "chunk_selection": _Field(torch.int32, (num_seqs,), -1),
            "chunk_start": _Field(torch.int32, (num_seqs,), 0),
            "chunk_len": _Field(torch.int32, (num_seqs,), 0),
            "attention_slots": _Field(torch.int32, table, -1),
            "attention_weights": _Field(torch.float32, table, 0),
            "mlp_slots": _Field(torch.int32, table, -1),
            "mlp_weights": _Field(torch.float32, table, 0),
        }
    return fields


def inputs_bytes(shape: GraphShape, block_size: int) -> int:
    return sum(_field_bytes(field) for field in _fields(shape, block_size).values())


def _field_bytes(field: _Field) -> int:
    return -(-math.prod(field.shape) * field.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticMemory:
    """The two blocks, of equal size."""

    host: Tensor  # uint8
    device: Tensor  # uint8

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> StaticMemory:
        is_cuda = device.type == "cuda"
        return cls(
            host=torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda),
            device=torch.zeros(num_bytes, dtype=torch.uint8, device=device),
        )


class GraphInputs:
    """One shape's views of the static memory."""

    def __init__(self, shape: GraphShape, memory: StaticMemory, *, block_size: int) -> None:
        self.shape = shape
        self._fields = _fields(shape, block_size)
        self._num_bytes = inputs_bytes(shape, block_size)
        self._memory = memory
        self._host = self._carve(memory.host)
        self._device = self._carve(memory.device)

    def fill(self, batch: InputBatch | None) -> None:
        """Write a batch, which lies on the host and fits the shape, or nothing but padding, and send it to the device.

        The copy does not wait. The host's block may be written again when something later was waited for: every step
        ends with that, and every recording of a graph begins with it.
        """
        host = self._host
        for name, field in self._fields.items():
            host[name].fill_(field.padding)
        torch.arange(self.shape.num_seqs + 1, out=host["query_start_loc"])
        if batch is not None:
            self._put_sequences(batch)
        if batch is not None and batch.lora is not None:
            self._put_lora(batch.lora)
        self._memory.device[: self._num_bytes].copy_(self._memory.host[: self._num_bytes], non_blocking=True)

    @property
    def input_ids(self) -> Tensor:
        return self._device["input_ids"]

    @property
    def positions(self) -> Tensor:
        return self._device["positions"]

    def attention(self) -> AttentionMeta:
        return AttentionMeta(
            query_start_loc=self._device["query_start_loc"],
            seq_lens=self._device["seq_lens"],
            block_table=self._device["block_table"],
            slot_mapping=self._device["slot_mapping"],
            num_decodes=self.shape.num_seqs,
            max_query_len=1,
            max_seq_len=self.shape.max_seq_len,
        )

    def lora(self) -> LoRAMeta | None:
        if not self.shape.table_width:
            return None
        views = self._device
        return LoRAMeta(
            token_selection=views["token_selection"],
            token_order=views["token_order"],
            chunk_selection=views["chunk_selection"],
            chunk_start=views["chunk_start"],
            chunk_len=views["chunk_len"],
            attention=SlotTable(slot_table=views["attention_slots"], slot_weight=views["attention_weights"], groups=()),
            mlp=SlotTable(slot_table=views["mlp_slots"], slot_weight=views["mlp_weights"], groups=()),
        )

    def _put_sequences(self, batch: InputBatch) -> None:
        host, attention = self._host, batch.attention
        _put(host["input_ids"], batch.input_ids)
        _put(host["positions"], batch.positions)
        _put(host["slot_mapping"], attention.slot_mapping)
        _put(host["seq_lens"], attention.seq_lens)
        _put(host["block_table"], attention.block_table[:, : host["block_table"].shape[1]])

    def _put_lora(self, lora: LoRAMeta) -> None:
        host = self._host
        _put(host["token_order"], lora.token_order)
        _put(host["token_selection"], lora.token_selection)
        _put(host["chunk_selection"], lora.chunk_selection)
        _put(host["chunk_start"], lora.chunk_start)
        _put(host["chunk_len"], lora.chunk_len)
        for space, table in (("attention", lora.attention), ("mlp", lora.mlp)):
            _put(host[f"{space}_slots"], table.slot_table)
            _put(host[f"{space}_weights"], table.slot_weight)

    def _carve(self, block: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, field in self._fields.items():
            num_bytes = math.prod(field.shape) * field.dtype.itemsize
            views[name] = block[start : start + num_bytes].view(field.dtype).view(field.shape)
            start += _field_bytes(field)
        return views


def _put(view: Tensor, values: Tensor) -> None:
    """Into the corner of the view; the rest stays padding."""
    view[tuple(slice(size) for size in values.shape)] = values
