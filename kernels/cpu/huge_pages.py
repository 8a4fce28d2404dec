"""Memory in huge pages, where the system has them.

The slots of a step's adapters lie all over gigabytes. With 4 KiB pages every few cache lines need another address
translation, which in a virtual machine takes as long as reading them.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20


def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
    """As `torch.zeros` on the CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(shape, dtype=dtype)
    # private: shared memory has a policy of its own, which is not to use them
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape).zero_()
