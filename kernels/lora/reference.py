"""LoRA in plain torch: gathered slots and batched products of fixed row count.

Why the delta of a row has the same bits in any batch: every product has `chunk_size` rows and at least two members
(a batched product of one member takes another code path in torch), its other sizes depend on the row's own
selection only, and widths are multiples of 16 (padded with zeros otherwise). For such shapes the row's result
depends neither on its place nor on the other members; `tests/kernels/lora` checks it byte by byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.lora.metadata import ChunkGroup, LoRAMeta, LoRAPools, Projection

_WIDTH_MULTIPLE = 16


def lora_apply(
    x: Tensor,
    y: Tensor,
    pools: LoRAPools,
    *,
    layer: int,
    projections: Sequence[Projection],
    meta: LoRAMeta | None,
) -> None:
    """See `Backend.lora_apply`. Everything but the last rounding is float32."""
    if meta is None:
        return
    space = meta.attention if projections[0].is_attention else meta.mlp
    outputs = torch.split(y, [pools.lora_b[projection].shape[-1] for projection in projections], dim=-1)
    for group in space.groups:
        rows = _pad_width(x.index_select(0, group.rows).float()).view(group.num_chunks, -1, _padded(x.shape[-1]))
        for projection, output in zip(projections, outputs, strict=True):
            delta = _delta(rows, pools, layer, projection, group)
            base = output.index_select(0, group.tokens)
            output.index_copy_(0, group.tokens, (base.float() + delta).to(y.dtype))


def _delta(rows: Tensor, pools: LoRAPools, layer: int, projection: Projection, group: ChunkGroup) -> Tensor:
    """Float32 `[num_kept, out_features]` of the group's real tokens."""
    lora_a = _gather(pools.lora_a[projection][layer], group.slots)
    lora_b = _gather(pools.lora_b[projection][layer], group.slots)
    scaling = pools.scaling[layer, projection][group.slots] * group.weight
    slot_rank = pools.lora_a[projection].shape[2]
    shrunk = torch.bmm(rows, lora_a.transpose(1, 2).expand(group.num_chunks, -1, -1))
    shrunk *= scaling.repeat_interleave(slot_rank, dim=1).unsqueeze(1)
    expanded = torch.bmm(shrunk, lora_b.expand(group.num_chunks, -1, -1))
    return expanded.flatten(0, 1).index_select(0, group.kept)[:, : pools.lora_b[projection].shape[-1]]


def _gather(pool: Tensor, slots: Tensor) -> Tensor:
    """`pool [num_slots, slot_rank, width]`, `slots [n, s]` -> float32 `[n, s * slot_rank, padded width]`."""
    gathered = pool.index_select(0, slots.flatten()).view(len(slots), -1, pool.shape[-1])
    return _pad_width(gathered.float())


def _pad_width(tensor: Tensor) -> Tensor:
    missing = _padded(tensor.shape[-1]) - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _padded(width: int) -> int:
    return -(-width // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
