"""LoRA over slot tables by two Triton kernels: shrink (`x @ A^T`) and expand (`y += scaling * (x @ A^T) @ B`).

Tokens are sorted by selection and cut into chunks of one selection, so a chunk reads the A and B rows of its own slots
only: no padding to a maximum rank, nothing at all for tokens without an adapter. The sum over `in_features` is split
so that a few tokens fill the GPU; every split stores float32 partial sums, which the expand adds up as it loads them.
Where there are chunks enough, a program of the shrink takes all splits one after the other and adds them up itself, so
that the many programs of the expand read one sum instead of all its parts. Either way the same sums are added in the
same order: there are no atomics, nothing needs zeroing first, and a row's delta has the same bits in every batch.
The scheme of chunks and pointer selection follows the papers Punica (MLSys 2024) and S-LoRA (MLSys 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import triton
from torch import Tensor

from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection, SlotTable
from loraplex.kernels.lora.triton_kernels import expand_kernel, shrink_kernel
from loraplex.kernels.triton_configs import (
    LORA_BLOCK_M,
    LORA_BLOCK_R,
    LORA_FULL_GRID,
    ExpandConfig,
    ShrinkConfig,
    expand_config,
    shrink_config,
)

_Value = TypeVar("_Value")

_MAX_SLICES = 3  # q, k and v


def lora_apply(
    x: Tensor,
    y: Tensor,
    pools: LoRAPools,
    *,
    layer: int,
    projections: Sequence[Projection],
    meta: LoRAMeta | None,
    architecture: int,
) -> None:
    """See `Backend.lora_apply`; `architecture` is a key of the configuration table.

    A chunk whose `chunk_selection` is -1 does nothing, so a layout of fixed capacity can be captured in a CUDA graph.
    """
    if meta is None or meta.num_chunks == 0:
        return
    assert 0 < len(projections) <= _MAX_SLICES, "more fused projections than the kernels take"
    assert list(projections) == list(range(projections[0], projections[0] + len(projections))), "not neighbours"
    assert x.stride(-1) == y.stride(-1) == 1, "features must be contiguous"
    space = meta.attention if projections[0].is_attention else meta.mlp
    slot_rank = pools.lora_a[projections[0]].shape[2]
    if space.slot_table.shape[1] == 0:  # no selection of the step has a slot in this space
        return
    lora_a = [_rank_rows(pools.lora_a[projection], layer) for projection in projections]
    lora_b = [_rank_rows(pools.lora_b[projection], layer) for projection in projections]
    itemsize = max(x.element_size(), lora_a[0].element_size())
    shrink = shrink_config(architecture, itemsize=itemsize, in_features=x.shape[1])
    expand = expand_config(architecture, itemsize=itemsize, out_features=max(each.shape[1] for each in lora_b))
    partials = _shrink(x, lora_a, meta, space=space, slot_rank=slot_rank, config=shrink)
    scaling = pools.scaling[layer, projections[0] :]
    _expand(partials, y, lora_b, meta, scaling, space=space, slot_rank=slot_rank, shrink=shrink, config=expand)


def _shrink(
    x: Tensor, lora_a: Sequence[Tensor], meta: LoRAMeta, *, space: SlotTable, slot_rank: int, config: ShrinkConfig
) -> Tensor:
    """Float32 `[slices, parts, rows, rank]`, not written where a row's selection has no such rank."""
    num_rank_tiles = triton.cdiv(space.slot_table.shape[1] * slot_rank, LORA_BLOCK_R)
    num_parts = 1 if meta.num_chunks * num_rank_tiles * len(lora_a) >= LORA_FULL_GRID else config.num_splits
    shape = (len(lora_a), num_parts, len(meta.token_order), num_rank_tiles * LORA_BLOCK_R)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    shrink_kernel[(meta.num_chunks, num_rank_tiles, len(lora_a) * num_parts)](
        x,
        _three(lora_a),
        partials,
        meta.token_order,
        meta.chunk_selection,
        meta.chunk_start,
        meta.chunk_len,
        space.slot_table,
        space.slot_table.shape[1],
        x.shape[1],
        len(meta.token_order),
        config.num_splits,
        config.num_splits // num_parts,
        x.stride(0),
        lora_a[0].stride(0),
        SLOT_RANK=slot_rank,
        BLOCK_M=LORA_BLOCK_M,
        BLOCK_R=LORA_BLOCK_R,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return partials


def _expand(
    partials: Tensor,
    y: Tensor,
    lora_b: Sequence[Tensor],
    meta: LoRAMeta,
    scaling: Tensor,
    *,
    space: SlotTable,
    slot_rank: int,
    shrink: ShrinkConfig,
    config: ExpandConfig,
) -> None:
    widths = [each.shape[1] for each in lora_b]
    assert sum(widths) == y.shape[1], "y must hold the outputs of all projections"
    expand_kernel[(meta.num_chunks, triton.cdiv(max(widths), config.block_n), len(lora_b))](
        partials,
        _three(lora_b),
        y,
        scaling,
        meta.token_order,
        meta.chunk_selection,
        meta.chunk_start,
        meta.chunk_len,
        space.slot_table,
        space.slot_weight,
        space.slot_table.shape[1],
        _three(widths),
        _three([each.stride(0) for each in lora_b]),
        partials.shape[2],
        partials.shape[1],
        partials.shape[3],
        y.stride(0),
        scaling.stride(0),
        SLOT_RANK=slot_rank,
        MAX_PARTS=shrink.num_splits,
        BLOCK_M=LORA_BLOCK_M,
        BLOCK_N=config.block_n,
        BLOCK_R=config.block_r,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def _rank_rows(pool: Tensor, layer: int) -> Tensor:
    """`[num_slots * slot_rank, features]` of one layer, without a copy."""
    return pool[layer].view(-1, pool.shape[-1])


def _three(values: Sequence[_Value]) -> tuple[_Value, ...]:
    """The values of up to three slices; the last one fills the places that are never read."""
    return (*values, *[values[-1]] * (_MAX_SLICES - len(values)))
