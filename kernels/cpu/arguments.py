"""Turns the metadata of a step into the structures of the library; these point into tensors that outlive the call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from loraplex.kernels.attention.metadata import AttentionMeta
from loraplex.kernels.cpu import native
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection, SlotTable


def batch_of(meta: AttentionMeta) -> native.Batch:
    return native.Batch(
        meta.query_start_loc.data_ptr(),
        meta.seq_lens.data_ptr(),
        meta.block_table.data_ptr(),
        meta.block_table.shape[1],
        meta.num_seqs,
    )


def lora_batch_of(meta: LoRAMeta) -> native.LoraBatch:
    return native.LoraBatch(
        meta.token_order.data_ptr(),
        meta.chunk_selection.data_ptr(),
        meta.chunk_start.data_ptr(),
        meta.chunk_len.data_ptr(),
        meta.num_chunks,
        meta.token_order.shape[0],
    )


def lora_table_of(table: SlotTable) -> native.LoraTable:
    return native.LoraTable(table.slot_table.data_ptr(), table.slot_weight.data_ptr(), table.slot_table.shape[1])


def lora_slices_of(pools: LoRAPools, layer: int, projections: Sequence[Projection]) -> ctypes.Array[native.LoraSlice]:
    """A layer's A, B and scaling, and the output's width, for each projection."""
    return (native.LoraSlice * len(projections))(
        *(
            native.LoraSlice(
                pools.lora_a[projection][layer].data_ptr(),
                pools.lora_b[projection][layer].data_ptr(),
                pools.scaling[layer, projection].data_ptr(),
                pools.lora_b[projection].shape[-1],
            )
            for projection in projections
        )
    )


def slot_rank_of(pools: LoRAPools) -> int:
    return next(iter(pools.lora_a.values())).shape[2]
