"""Attention over the paged cache: the only place that reads or writes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.dispatch import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttention:
    """Causal attention of one layer."""

    backend: Backend
    scale: float
    sliding_window: int | None  # keys that a query sees, itself included; None = all

    def forward(self, q: Tensor, k: Tensor, v: Tensor, kv_cache: KVCache, meta: AttentionMeta) -> Tensor:
        """Store `k, v [T, kv_heads, head_dim]`, then attend with `q [T, heads, head_dim]`; same shape as `q`."""
        self.backend.store_kv(k, v, kv_cache, meta.slot_mapping)
        return self.backend.paged_attention(q, kv_cache, meta, scale=self.scale, sliding_window=self.sliding_window)
