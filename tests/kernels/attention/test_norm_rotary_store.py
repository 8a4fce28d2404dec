"""From the fused projection to attention, against float64: every place of the cache that is not written stays NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex.kernels.attention.metadata import HeadTransform, KVCache
from tests.kernels.attention import helpers
from tests.kernels.oracle import assert_close

BLOCK_SIZE = 4
SLOTS = (7, 0, 13, 2, 9)  # of five tokens, in four blocks


def create_transform(head_dim: int, dtype: torch.dtype, *, has_norm: bool, has_rope: bool) -> HeadTransform:
    generator = torch.Generator().manual_seed(1)
    q_norm, k_norm = (1 + torch.randn(2, head_dim, generator=generator).to(dtype) / 4).unbind()
    angle = torch.randn(len(SLOTS), head_dim // 2, generator=generator).repeat(1, 2)
    return HeadTransform(
        q_norm=q_norm if has_norm else None,
        k_norm=k_norm if has_norm else None,
        eps=1e-5,
        cos=angle.cos().to(dtype) if has_rope else None,
        sin=angle.sin().to(dtype) if has_rope else None,
    )


def expected_heads(heads: Tensor, norm: Tensor | None, transform: HeadTransform) -> Tensor:
    wide = heads.double()
    if norm is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + transform.eps).sqrt() * norm.double()
    if transform.cos is not None and transform.sin is not None:
        first, second = wide.chunk(2, dim=-1)
        other = torch.cat((-second, first), dim=-1)
        wide = wide * transform.cos.double().unsqueeze(1) + other * transform.sin.double().unsqueeze(1)
    return wide


def create_cache(kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
    shape = (4, BLOCK_SIZE, kv_heads, head_dim)
    return KVCache(key=torch.full(shape, torch.nan, dtype=dtype), value=torch.full(shape, torch.nan, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (1, 1, 2)])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_rope", [False, True])
def test_norms_rotates_and_stores(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, has_norm: bool, has_rope: bool
) -> None:
    transform = create_transform(head_dim, dtype, has_norm=has_norm, has_rope=has_rope)
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(len(SLOTS), width, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = qkv.clone()
    cache = create_cache(kv_heads, head_dim, dtype)
    slots = torch.tensor(SLOTS)
    turned = helpers.BACKEND.norm_rotary_store(qkv, transform, cache, slots)
    q, k, v = torch.split(qkv.view(len(SLOTS), -1, head_dim), [heads, kv_heads, kv_heads], dim=1)
    assert torch.equal(qkv, before)
    assert_close(turned, expected_heads(q, transform.q_norm, transform), dtype)
    assert_close(cache.key.flatten(0, 1)[slots], expected_heads(k, transform.k_norm, transform), dtype)
    assert torch.equal(cache.value.flatten(0, 1)[slots], v)
    others = [slot for slot in range(4 * BLOCK_SIZE) if slot not in SLOTS]
    assert cache.key.flatten(0, 1)[others].isnan().all()
    assert cache.value.flatten(0, 1)[others].isnan().all()
