"""Memory in huge pages, where the system has them.

Through pages of 4 KiB a stream of weights reaches little more than half of the memory's bandwidth on one core, since
prefetching ends with each page. And the slots of a step's adapters lie all over gigabytes: every few cache lines need
another address translation, which in a virtual machine takes as long as reading them.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`, which is what devices other than the CPU get."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    # private: shared memory has a policy of its own, which is not to use them
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class WeightMemory:
    """Cuts large pieces, so that weights smaller than a huge page share one. A piece lives as long as any cut of it."""

    def __init__(self) -> None:
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """`[size]`, not initialised, on a cache line."""
        num_bytes = -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._left):
            self._left = empty(max(num_bytes, _PIECE_BYTES), dtype=torch.uint8, device=torch.device("cpu"))
        cut, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return cut.view(dtype)[:size]
