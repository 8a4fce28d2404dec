"""Attention over the paged cache: the only place that reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.dispatch import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """Causal attention of one layer."""

    backend: Backend
    scale: float
    sliding_window: int | None  # keys that a query sees, itself included; None = all

    def forward(self, qkv: Tensor, transform: HeadTransform, kv_cache: KVCache, meta: AttentionMeta) -> Tensor:
        """Store the keys and values of `qkv [T, q_size + 2 * kv_size]`, attend to them -> `[T, heads, head_dim]`."""
        q = self.backend.norm_rotary_store(qkv, transform, kv_cache, meta.slot_mapping)
        return self.backend.paged_attention(q, kv_cache, meta, scale=self.scale, sliding_window=self.sliding_window)
