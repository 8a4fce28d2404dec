"""Every format comes out of the one layout as the very numbers that it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from loraplex.kernels.quant.layout import can_fuse, from_awq, from_gptq, fuse, pack_rows, unpack_rows
from loraplex.kernels.quant.metadata import W4Weight
from loraplex.kernels.quant.reference import dequantize
from tests.kernels.quant.helpers import Quantized, awq_tensors, create_quantized

SIZES = [(96, 40, 32), (192, 16, 128), (64, 8, 16), (40, 24, -1), (128, 8, 128)]


def assert_holds(weight: W4Weight, quantized: Quantized) -> None:
    assert torch.equal(dequantize(weight, torch.float32).T.double(), quantized.expected())


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("in_features", "out_features", "group_size"), SIZES)
def test_gptq_is_kept_to_the_bit(
    in_features: int, out_features: int, group_size: int, version: int, act_order: bool, scale_dtype: torch.dtype
) -> None:
    quantized = create_quantized(in_features, out_features, group_size, act_order=act_order, scale_dtype=scale_dtype)
    weight = quantized.gptq(version)
    assert (weight.in_features, weight.out_features) == (in_features, out_features)
    assert (weight.perm is not None) == (act_order and weight.scales.shape[0] > 1)
    assert_holds(weight, quantized)


@pytest.mark.parametrize(("in_features", "out_features", "group_size"), SIZES)
def test_awq_is_kept_to_the_bit(in_features: int, out_features: int, group_size: int) -> None:
    quantized = create_quantized(in_features, out_features, group_size)
    weight = from_awq(**awq_tensors(quantized), group_size=group_size)
    assert weight.perm is None
    assert_holds(weight, quantized)


def test_a_word_of_each_format_by_hand() -> None:
    assert unpack_rows(torch.tensor([[0x76543210], [-1]], dtype=torch.int32)).flatten().tolist() == [
        *range(8),
        *[15] * 8,
    ]
    awq = from_awq(
        qweight=torch.full((8, 1), 0x75316420, dtype=torch.int32),
        qzeros=torch.zeros(1, 1, dtype=torch.int32),
        scales=torch.ones(1, 8),
        group_size=8,
    )
    assert dequantize(awq, torch.float32)[:, 0].tolist() == list(range(8))


def test_packing_is_the_inverse_of_unpacking() -> None:
    packed = torch.randint(-(2**31), 2**31, (5, 3), dtype=torch.int64).int()
    assert torch.equal(pack_rows(unpack_rows(packed)), packed)


def test_weights_of_one_input_are_fused_side_by_side() -> None:
    q, k = (create_quantized(96, width, 32, seed=width) for width in (40, 8))
    assert can_fuse([q.gptq(), k.gptq()])
    fused = dequantize(fuse([q.gptq(), k.gptq()]), torch.float32)
    assert torch.equal(fused, torch.cat([dequantize(each.gptq(), torch.float32) for each in (q, k)]))


def test_weights_that_order_their_rows_otherwise_are_not_fused() -> None:
    plain = create_quantized(96, 8, 32)
    ordered, other = (create_quantized(96, 8, 32, act_order=True, seed=seed) for seed in (1, 2))
    assert can_fuse([ordered.gptq(), replace(plain, group=ordered.group).gptq()])
    for pair in ((plain, ordered), (ordered, other), (plain, create_quantized(96, 8, -1))):
        assert not can_fuse([each.gptq() for each in pair])


def test_a_g_idx_of_uneven_groups_is_refused() -> None:
    quantized = create_quantized(96, 8, 32)
    group = quantized.group.copy()
    group[0] = 1
    with pytest.raises(ValueError, match="g_idx does not cut 96 rows into groups of 32"):
        replace(quantized, group=group).gptq()


def test_tensors_that_do_not_fit_each_other_are_refused() -> None:
    tensors = awq_tensors(create_quantized(96, 40, 32))
    with pytest.raises(ValueError, match=r"qzeros hold \[3, 32\] zeros, but there are \[3, 40\] scales"):
        from_awq(**{**tensors, "qzeros": tensors["qzeros"][:, :4]}, group_size=32)
    with pytest.raises(ValueError, match=r"scales must be torch.float16 \[2, 40\] and contiguous, not .* \[3, 40\]"):
        from_awq(**tensors, group_size=64)
    with pytest.raises(ValueError, match="a group of 24 rows is not supported"):
        from_awq(**awq_tensors(create_quantized(96, 40, 24)), group_size=24)
    with pytest.raises(ValueError, match="qweight must be an int32 matrix"):
        from_awq(**{**tensors, "qweight": tensors["qweight"].long()}, group_size=32)
    with pytest.raises(ValueError, match="90 input features are not a multiple of 8"):
        from_awq(**{**tensors, "qweight": tensors["qweight"][:90]}, group_size=32)
    with pytest.raises(ValueError, match="no version 3"):
        from_gptq(**tensors, g_idx=None, group_size=32, version=3)
