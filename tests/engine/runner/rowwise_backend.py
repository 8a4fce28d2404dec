"""A backend for padded batches whose rows have the same bits in every batch, as the GPU kernels promise for LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.dispatch import PreparedLinear
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection
from loraplex.kernels.reference import ReferenceBackend


class RowwiseBackend(ReferenceBackend):
    """Computes row by row, skips padding as the Triton kernels do, and reads of a LoRA layout what they read."""

    lora_chunk_size = 3

    def linear(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        return torch.cat([super(RowwiseBackend, self).linear(row, weight) for row in torch.split(x, 1)])

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        kept = slot_mapping >= 0
        super().store_kv(key[kept], value[kept], cache, slot_mapping[kept])

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        num_real = int((meta.seq_lens > 0).sum())
        starts = meta.query_start_loc[: num_real + 1]
        real = replace(meta, query_start_loc=starts, seq_lens=meta.seq_lens[:num_real])
        output = torch.zeros_like(q)
        num_tokens = int(starts[-1])
        output[:num_tokens] = super().paged_attention(
            q[:num_tokens], cache, real, scale=scale, sliding_window=sliding_window
        )
        return output

    def lora_apply(
        self,
        x: Tensor,
        y: Tensor,
        pools: LoRAPools,
        *,
        layer: int,
        projections: Sequence[Projection],
        meta: LoRAMeta | None,
    ) -> None:
        if meta is None:
            return
        space = meta.attention if projections[0].is_attention else meta.mlp
        for chunk, selection in enumerate(meta.chunk_selection.tolist()):
            start = int(meta.chunk_start[chunk])
            rows = meta.token_order[start : start + int(meta.chunk_len[chunk])].tolist() if selection >= 0 else []
            for row in rows:
                slots = zip(space.slot_table[selection].tolist(), space.slot_weight[selection].tolist(), strict=True)
                for slot, weight in slots:
                    if slot >= 0:
                        y[row] += _delta(x[row], pools, layer, projections, slot) * weight


def _delta(x: Tensor, pools: LoRAPools, layer: int, projections: Sequence[Projection], slot: int) -> Tensor:
    return torch.cat(
        [
            pools.scaling[layer, projection, slot]
            * ((pools.lora_a[projection][layer, slot] @ x) @ pools.lora_b[projection][layer, slot])
            for projection in projections
        ]
    )
