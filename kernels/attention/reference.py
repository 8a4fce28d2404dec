"""Paged attention in plain torch, one sequence after another.

A sequence's blocks are gathered and cut to the keys that its queries see before anything is multiplied. So unwritten
places, unused table entries and the blocks of others are never read, nothing is padded, and a row's bits do not depend
on its neighbours. On a CPU this was also faster than padding the sequences of a batch to one length and masking them:
the mask costs more passes over the keys and values than the attention itself.

Within a prefill a mask hides later keys from earlier queries. It does not hide NaN (0 * NaN is NaN), so a sequence that
holds a value that is not finite is attended to query by query, each with the keys that it sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache


def store_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See `Backend.store_kv`."""
    cache.key.flatten(0, 1).index_copy_(0, slot_mapping, key)
    cache.value.flatten(0, 1).index_copy_(0, slot_mapping, value)


def paged_attention(
    q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
) -> Tensor:
    """See `Backend.paged_attention`."""
    output = torch.empty_like(q)
    block_size = cache.key.shape[1]
    starts = meta.query_start_loc.tolist()
    for sequence, seq_len in enumerate(meta.seq_lens.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        first = _first_seen(seq_len, rows.stop - rows.start, sliding_window)
        first_block = first // block_size
        blocks = meta.block_table[sequence, first_block : -(-seq_len // block_size)]
        seen = slice(first - first_block * block_size, seq_len - first_block * block_size)
        key, value = (
            pool.index_select(0, blocks).flatten(0, 1)[seen].transpose(0, 1) for pool in (cache.key, cache.value)
        )
        output[rows] = _attend(q[rows], key, value, scale=scale, sliding_window=sliding_window)
    return output


def _first_seen(seq_len: int, query_len: int, sliding_window: int | None) -> int:
    """The first key that the first query sees."""
    return 0 if sliding_window is None else max(0, seq_len - query_len + 1 - sliding_window)


def _attend(q: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
    """`q [n, heads, head_dim]` are the last n positions of `key, value [kv_heads, length, head_dim]`.

    The first key is the first that the first query sees.
    """
    if len(q) == 1:
        return _attend_with_one(q, key, value, scale=scale)
    if _is_finite(key) and _is_finite(value):
        return _attend_with_many(q, key, value, scale=scale, sliding_window=sliding_window)
    end = key.shape[1] - len(q)
    return torch.cat(
        [
            _attend_with_one(q[row : row + 1], key[:, seen], value[:, seen], scale=scale)
            for row in range(len(q))
            for seen in (slice(_first_seen(end + row + 1, 1, sliding_window), end + row + 1),)
        ]
    )


def _attend_with_one(q: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """One query sees all keys. The query heads that share a key head are the rows of one product."""
    grouped = q.view(1, len(key), -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, key[None], value[None], scale=scale).view(q.shape)


def _attend_with_many(q: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, length, _ = key.shape
    group_size = num_heads // num_kv_heads
    is_plain = num_queries == length and (sliding_window is None or sliding_window >= length)  # spares the mask
    attended = F.scaled_dot_product_attention(
        q.view(num_queries, num_kv_heads, group_size, head_dim).permute(2, 1, 0, 3),
        key.expand(group_size, -1, -1, -1),
        value.expand(group_size, -1, -1, -1),
        attn_mask=None if is_plain else _mask(num_queries, length, sliding_window, q.device),
        is_causal=is_plain,
        scale=scale,
    )
    return attended.permute(2, 1, 0, 3).reshape(q.shape)


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.sum(dtype=torch.float32).isfinite())


def _mask(num_queries: int, length: int, sliding_window: int | None, device: torch.device) -> Tensor:
    """bool `[n, length]`: True where a query sees a key."""
    query = torch.arange(length - num_queries, length, device=device).unsqueeze(1)
    key = torch.arange(length, device=device)
    seen = key <= query
    return seen if sliding_window is None else seen & (key > query - sliding_window)
