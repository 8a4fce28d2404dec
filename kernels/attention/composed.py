"""The way from the fused projection to attention, function by function: what a backend that fuses it is measured by."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from loraplex.kernels.attention.metadata import HeadTransform, KVCache

if TYPE_CHECKING:
    from loraplex.kernels.dispatch import Backend


def norm_rotary_store(
    backend: Backend, qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor
) -> Tensor:
    """See `Backend.norm_rotary_store`; made of the backend's own functions."""
    num_kv_heads, head_dim = cache.key.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if transform.q_norm is not None and transform.k_norm is not None:
        q = backend.rms_norm(q, transform.q_norm, transform.eps)
        k = backend.rms_norm(k, transform.k_norm, transform.eps)
    if transform.cos is not None and transform.sin is not None:
        q, k = backend.rotary(q, k, transform.cos, transform.sin)
    backend.store_kv(k, v, cache, slot_mapping)
    return q
