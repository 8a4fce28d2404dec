"""A linear weight in 4 bits: the one layout into which every format is repacked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NIBBLES = 8  # weights of an int32 word


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Weight:
    """`w[perm[k], n] = q[k, n] * scales[k // group_size, n] - scaled_zeros[k // group_size, n]`.

    With scales of 16 bits and `scaled_zeros` in float32 this is `(q - zero) * scale` without any rounding. The last
    group may be short.

    Raises:
        ValueError: the tensors do not fit each other, or the group size is one that no kernel takes.
    """

    qweight: Tensor  # int32 [in / 8, out]: nibble i, from the low end, of word j is row 8 * j + i of q
    scales: Tensor  # [groups, out], in the dtype they came in
    scaled_zeros: Tensor  # float32 [groups, out]
    group_size: int  # rows of a group
    perm: Tensor | None = None  # int32 [in]: the input feature of each row of q; None = the same

    def __post_init__(self) -> None:
        num_groups = -(-self.in_features // self.group_size) if self.group_size > 0 else 0
        if num_groups > 1 and self.group_size % 16:
            raise ValueError(
                f"a group of {self.group_size} rows is not supported: it must be a multiple of 16, or all rows"
            )
        _check("qweight", self.qweight, (self.in_features // NIBBLES, self.out_features), torch.int32)
        _check("scales", self.scales, (num_groups, self.out_features), self.scales.dtype)
        _check("scaled_zeros", self.scaled_zeros, (num_groups, self.out_features), torch.float32)
        if not self.scales.is_floating_point():
            raise ValueError(f"scales must be floating-point numbers, not {self.scales.dtype}")
        if self.perm is not None:
            _check("perm", self.perm, (self.in_features,), torch.int32)

    @property
    def in_features(self) -> int:
        return self.qweight.shape[0] * NIBBLES

    @property
    def out_features(self) -> int:
        return self.qweight.shape[1]

    @property
    def nbytes(self) -> int:
        perm_bytes = 0 if self.perm is None else self.perm.nbytes
        return self.qweight.nbytes + self.scales.nbytes + self.scaled_zeros.nbytes + perm_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Linear:
    """Fills `PreparedLinear` with the packed weight as it is."""

    weight: W4Weight
    bias: Tensor | None  # [out]

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} and contiguous, not {tensor.dtype} {list(tensor.shape)}"
            f"{'' if tensor.is_contiguous() else ' in strides'}"
        )
