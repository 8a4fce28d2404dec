"""Paged attention in Triton: the KV store, and which kernel takes which sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.attention.triton_decode import attend_decodes
from loraplex.kernels.attention.triton_prefill import attend_prefills


def paged_attention(
    q: Tensor,
    cache: KVCache,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None,
    architecture: int,
) -> Tensor:
    """See `Backend.paged_attention`; `architecture` is a key of the configuration table."""
    assert q.stride(-1) == cache.key.stride(-1) == 1, "head_dim must be contiguous"
    assert cache.key.stride() == cache.value.stride(), "keys and values must be laid out alike"
    assert q.shape[1] % cache.key.shape[2] == 0, "query heads must be a multiple of key heads"
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for attend, is_needed in (
        (attend_decodes, meta.num_decodes > 0),
        (attend_prefills, meta.num_seqs > meta.num_decodes),
    ):
        if is_needed:
            attend(q, output, cache, meta, scale=scale, sliding_window=sliding_window, architecture=architecture)
    return output


def store_kv(key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """See `Backend.store_kv`; a place of -1 (the padding of a captured batch) is not written."""
    assert key.stride(-1) == value.stride(-1) == cache.key.stride(-1) == 1, "head_dim must be contiguous"
    assert cache.key.stride() == cache.value.stride(), "keys and values must be laid out alike"
    num_tokens, num_kv_heads, head_dim = key.shape
    store_kv_kernel[(num_tokens,)](
        key,
        value,
        cache.key,
        cache.value,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *cache.key.stride()[:3],
        NUM_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=cache.key.shape[1],
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@triton.jit
def store_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    stride_key_token: int,
    stride_key_head: int,
    stride_value_token: int,
    stride_value_head: int,
    stride_block: int,
    stride_offset: int,
    stride_kv_head: int,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One token.

    Semantics: cache[slot_mapping[t] // BLOCK_SIZE, slot_mapping[t] % BLOCK_SIZE] = key[t], and so the values.

    Shape:
        key, value: [num_tokens, NUM_HEADS, HEAD_DIM].
        key_cache, value_cache: [num_blocks, BLOCK_SIZE, NUM_HEADS, HEAD_DIM], both with the given strides.
        slot_mapping: int64 [num_tokens], -1 = nowhere.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    mask = (head < NUM_HEADS) & (dim < HEAD_DIM)
    place = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_offset + head * stride_kv_head + dim
    new_key = tl.load(key + token * stride_key_token + head * stride_key_head + dim, mask=mask)
    tl.store(key_cache + place, new_key, mask=mask)
    new_value = tl.load(value + token * stride_value_token + head * stride_value_head + dim, mask=mask)
    tl.store(value_cache + place, new_value, mask=mask)
