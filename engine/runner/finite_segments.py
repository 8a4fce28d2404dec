"""Which sequences of a flat batch are free of NaN and Inf, said on the device that holds them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def finite_segments(is_finite: Tensor, starts: Tensor) -> Tensor:
    """Whether all of `is_finite [T]` in each of the segments that `starts [S + 1]` bound are: bool `[S]`."""
    num_bad = F.pad((~is_finite).cumsum(0), (1, 0))
    return num_bad[starts[1:]] == num_bad[starts[:-1]]
