"""Small host arrays on their way to the device, without waiting for what it is doing."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy in the order of the device's work; on a CPU, the array itself.

    CUDA takes pageable memory into a buffer of its own before the call returns, so `values` may change afterwards.
    A blocking copy would wait for the whole forward pass.
    """
    return torch.from_numpy(values).to(device, non_blocking=True)
