"""Sequences in a paged cache whose every place outside of them is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.reference import ReferenceBackend
from tests.kernels.oracle import attend

CPU = torch.device("cpu")
BACKEND = ReferenceBackend(CPU)


@dataclass(frozen=True, kw_only=True)
class PagedBatch:
    """`keys[i], values[i] [length, kv_heads, head_dim]` of each sequence; its last `query_lens[i]` are new."""

    query_lens: Sequence[int]
    queries: Sequence[Tensor]  # [query_len, heads, head_dim]
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    scale: float
    block_size: int = 16
    sliding_window: int | None = None

    def meta(self) -> AttentionMeta:
        """Blocks are dealt out in an order that is neither sorted nor contiguous; block 0 is nobody's."""
        counts = [-(-len(key) // self.block_size) + 1 for key in self.keys]  # one more than needed
        order = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(5)) + 1).tolist())
        return build_attention_meta(
            query_lens=self.query_lens,
            context_lens=[len(key) - new for key, new in zip(self.keys, self.query_lens, strict=True)],
            block_ids=[[next(order) for _ in range(count)] for count in counts],
            block_size=self.block_size,
            device=CPU,
        )

    def cache(self, meta: AttentionMeta) -> KVCache:
        """Holds the context of every sequence, and NaN everywhere else."""
        shape = (int(meta.block_table.max()) + 2, self.block_size, *self.keys[0].shape[1:])
        cache = KVCache(
            key=torch.full(shape, torch.nan, dtype=self.keys[0].dtype),
            value=torch.full(shape, torch.nan, dtype=self.keys[0].dtype),
        )
        for sequence, new in enumerate(self.query_lens):
            for position in range(len(self.keys[sequence]) - new):
                block = meta.block_table[sequence, position // self.block_size]
                cache.key[block, position % self.block_size] = self.keys[sequence][position]
                cache.value[block, position % self.block_size] = self.values[sequence][position]
        return cache

    def run(self) -> list[Tensor]:
        meta = self.meta()
        cache = self.cache(meta)
        new_keys = torch.cat([key[-new:] for key, new in zip(self.keys, self.query_lens, strict=True)])
        new_values = torch.cat([value[-new:] for value, new in zip(self.values, self.query_lens, strict=True)])
        BACKEND.store_kv(new_keys, new_values, cache, meta.slot_mapping)
        output = BACKEND.paged_attention(
            torch.cat(list(self.queries)), cache, meta, scale=self.scale, sliding_window=self.sliding_window
        )
        return list(torch.split(output, list(self.query_lens)))

    def expected(self) -> list[Tensor]:
        return [
            attend(q, key, value, scale=self.scale, sliding_window=self.sliding_window)
            for q, key, value in zip(self.queries, self.keys, self.values, strict=True)
        ]

    def take(self, sequence: int) -> PagedBatch:
        return PagedBatch(
            query_lens=[self.query_lens[sequence]],
            queries=[self.queries[sequence]],
            keys=[self.keys[sequence]],
            values=[self.values[sequence]],
            scale=self.scale,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
        )


def create_paged_batch(
    lens: Sequence[tuple[int, int]],
    *,
    num_heads: int = 6,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    sliding_window: int | None = None,
) -> PagedBatch:
    """`lens`: (tokens in the cache, tokens of this step) of each sequence."""
    generator = torch.Generator().manual_seed(0)

    def normal(length: int, heads: int) -> Tensor:
        return torch.randn(length, heads, head_dim, generator=generator).to(dtype)

    return PagedBatch(
        query_lens=[new for _, new in lens],
        queries=[normal(new, num_heads) for _, new in lens],
        keys=[normal(context + new, num_kv_heads) for context, new in lens],
        values=[normal(context + new, num_kv_heads) for context, new in lens],
        scale=head_dim**-0.5,
        block_size=block_size,
        sliding_window=sliding_window,
    )
