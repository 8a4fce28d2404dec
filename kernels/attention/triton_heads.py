"""From the fused projection to attention in one launch: norms of the heads, rotation, and the KV store."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex.kernels.attention.metadata import HeadTransform, KVCache


def norm_rotary_store(qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor) -> Tensor:
    """See `Backend.norm_rotary_store`; a slot mapping of -1 (the padding of a captured batch) stores nothing."""
    assert qkv.stride(-1) == cache.key.stride(-1) == 1, "head_dim must be contiguous"
    assert cache.key.stride() == cache.value.stride(), "keys and values must be laid out alike"
    block_size, num_kv_heads, head_dim = cache.key.shape[1:]
    assert head_dim % 2 == 0, "a head is rotated by halves"
    group = qkv.shape[1] // head_dim // num_kv_heads - 2
    q = torch.empty(len(qkv), group * num_kv_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    block_g, block_half = triton.next_power_of_2(group), triton.next_power_of_2(head_dim // 2)
    norm_rotary_store_kernel[(len(qkv), num_kv_heads)](
        qkv,
        (transform.q_norm, transform.k_norm),
        transform.cos,
        transform.sin,
        q,
        cache.key,
        cache.value,
        slot_mapping,
        transform.eps,
        qkv.stride(0),
        0 if transform.cos is None else _row_stride(transform),
        cache.key.stride()[:3],
        GROUP=group,
        HALF=head_dim // 2,
        BLOCK_SIZE=block_size,
        BLOCK_G=block_g,
        BLOCK_HALF=block_half,
        num_warps=min(8, max(1, block_g * block_half // 256)),
    )
    return q


def _row_stride(transform: HeadTransform) -> int:
    assert transform.cos is not None
    assert transform.sin is not None
    assert transform.cos.stride() == transform.sin.stride(), "cos and sin must be laid out alike"
    assert transform.cos.stride(-1) == 1, "head_dim must be contiguous"
    return transform.cos.stride(0)


@triton.jit
def norm_rotary_store_kernel(
    qkv: tl.tensor,
    norms: tl.tuple,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    q: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    eps: float,
    stride_qkv: int,
    stride_cos: int,
    cache_strides: tl.tuple,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One token, one key head with its value and the query heads that share it.

    Semantics: q[t, h] = rotate(norm(query head h of qkv[t])), and so the key into key_cache at slot_mapping[t], the
    value as it is into value_cache; norm as in `rms_norm_kernel`, rotate as in `rotary_kernel`, each rounded once.

    Shape:
        qkv: [num_tokens, (GROUP + 2) * kv_heads * 2 * HALF], rows `stride_qkv` apart: query, key, value heads.
        norms: [2 * HALF] of queries and keys, or None.
        cos, sin: [num_tokens, 2 * HALF], rows `stride_cos` apart, or None.
        q: [num_tokens, GROUP * kv_heads, 2 * HALF], contiguous.
        key_cache, value_cache: [num_blocks, BLOCK_SIZE, kv_heads, 2 * HALF].
        slot_mapping: int64 [num_tokens], -1 = nowhere.
    """
    token = tl.program_id(0).to(tl.int64)
    kv_head, num_kv_heads = tl.program_id(1), tl.num_programs(1)
    heads = qkv + token * stride_qkv
    turn = token * stride_cos
    member = tl.arange(0, BLOCK_G)
    head = kv_head * GROUP + member
    first, second = _load_halves(heads, head, member < GROUP, HALF, BLOCK_HALF)
    first, second = _transform(first, second, norms[0], cos, sin, turn, eps, qkv.dtype.element_ty, HALF)
    place = q + (token * num_kv_heads * GROUP + head) * (2 * HALF)
    _store_halves(place, first, second, member < GROUP, HALF)

    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    one = tl.arange(0, 1)
    cached = slot // BLOCK_SIZE * cache_strides[0] + slot % BLOCK_SIZE * cache_strides[1]
    cached += kv_head * cache_strides[2] + one
    head = num_kv_heads * GROUP + kv_head + one
    first, second = _load_halves(heads, head, one == 0, HALF, BLOCK_HALF)
    first, second = _transform(first, second, norms[1], cos, sin, turn, eps, qkv.dtype.element_ty, HALF)
    _store_halves(key_cache + cached, first, second, one == 0, HALF)
    first, second = _load_halves(heads, head + num_kv_heads, one == 0, HALF, BLOCK_HALF)
    _store_halves(value_cache + cached, first, second, one == 0, HALF)


@triton.jit
def _load_halves(
    heads: tl.tensor, head: tl.tensor, is_head: tl.tensor, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """float32 [heads, dims]: the first and the second half of each head."""
    dim = tl.arange(0, BLOCK_HALF)[None, :]
    mask = is_head[:, None] & (dim < HALF)
    place = heads + (head * (2 * HALF))[:, None] + dim
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(
    place: tl.tensor, first: tl.tensor, second: tl.tensor, is_head: tl.tensor, HALF: tl.constexpr
) -> None:
    dim = tl.arange(0, first.shape[1])[None, :]
    mask = is_head[:, None] & (dim < HALF)
    tl.store(place[:, None] + dim, first.to(place.dtype.element_ty), mask=mask)
    tl.store(place[:, None] + dim + HALF, second.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _transform(
    first: tl.tensor,
    second: tl.tensor,
    norm: tl.tensor | None,
    cos: tl.tensor | None,
    sin: tl.tensor | None,
    turn: tl.tensor,
    eps: float,
    dtype: tl.constexpr,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The halves after norm and rotation; not yet rounded after the latter."""
    dim = tl.arange(0, first.shape[1])
    is_dim = dim < HALF
    if norm is not None:
        mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
        inverse = tl.rsqrt(mean + eps)[:, None]
        weight = tl.load(norm + dim, mask=is_dim, other=0.0).to(tl.float32)
        first = ((first * inverse).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
        weight = tl.load(norm + dim + HALF, mask=is_dim, other=0.0).to(tl.float32)
        second = ((second * inverse).to(dtype).to(tl.float32) * weight[None, :]).to(dtype).to(tl.float32)
    if cos is not None:
        cos_first = tl.load(cos + turn + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        sin_first = tl.load(sin + turn + dim, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        cos_second = tl.load(cos + turn + dim + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        sin_second = tl.load(sin + turn + dim + HALF, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        first, second = first * cos_first - second * sin_first, second * cos_second + first * sin_second
    return first, second
