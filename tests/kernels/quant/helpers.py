"""Random 4-bit weights, and the files of GPTQ and AWQ that would hold them, packed one value after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.kernels.quant.layout import from_gptq
from loraplex.kernels.quant.metadata import W4Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble, from the low end


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """`(values - zeros) * scales`, the zeros and scales those of the row's group."""

    values: NDArray[np.uint8]  # [in, out], 0 to 15
    zeros: NDArray[np.uint8]  # [groups, out], 0 to 15
    scales: Tensor  # [groups, out]
    group: NDArray[np.int32]  # [in]
    group_size: int

    def expected(self) -> Tensor:
        """float64 `[in, out]`."""
        zeros = self.zeros[self.group].astype(np.float64)
        return torch.from_numpy(self.values - zeros) * self.scales.double()[torch.from_numpy(self.group).long()]

    def gptq(self, version: int = 2) -> W4Weight:
        zeros = pack(self.zeros, range(8))
        return from_gptq(
            qweight=_words(pack(self.values.T, range(8)).T),
            qzeros=_words(zeros if version == 2 else zeros - np.uint32(0x11111111)),
            scales=self.scales,
            g_idx=torch.from_numpy(self.group),
            group_size=self.group_size,
            version=version,
        )


def pack(values: NDArray[np.uint8], order: tuple[int, ...] | range) -> NDArray[np.uint32]:
    """Eight columns a word; `order[place]` is the column at that place."""
    packed = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for place, column in enumerate(order):
        packed |= values[:, column::8].astype(np.uint32) << np.uint32(4 * place)
    return packed


def awq_tensors(weight: Quantized) -> dict[str, Tensor]:
    return {
        "qweight": _words(pack(weight.values, AWQ_ORDER)),
        "qzeros": _words(pack(weight.zeros, AWQ_ORDER)),
        "scales": weight.scales,
    }


def create_quantized(
    in_features: int,
    out_features: int,
    group_size: int,
    *,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
) -> Quantized:
    """`group_size` -1 = one group."""
    rng = np.random.default_rng(seed)
    rows = in_features if group_size == -1 else group_size
    group = np.arange(in_features, dtype=np.int32) // rows
    num_groups = int(group[-1]) + 1
    zeros = rng.integers(0, 16, (num_groups, out_features)).astype(np.uint8)
    zeros[0, :2] = 0, 15  # a zero of 0 is what GPTQ's first version says by a borrow
    return Quantized(
        values=rng.integers(0, 16, (in_features, out_features)).astype(np.uint8),
        zeros=zeros,
        scales=torch.from_numpy(rng.uniform(0.5, 1.5, (num_groups, out_features)) / 64).to(scale_dtype),
        group=rng.permutation(group) if act_order else group,
        group_size=group_size,
    )


def _words(packed: NDArray[np.uint32]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))
