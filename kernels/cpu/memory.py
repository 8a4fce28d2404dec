"""Memory for weights, in huge pages where the system has them: they are read from front to back in every step."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
_ALIGNMENT = 64


class WeightMemory:
    """Cuts large pieces, so that weights smaller than a huge page share one. A piece lives as long as any cut of it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._left = torch.empty(0, dtype=torch.uint8)

    def empty(self, size: int, dtype: torch.dtype) -> Tensor:
        """`[size]`, not initialised, on a cache line."""
        num_bytes = -(-size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if num_bytes > len(self._left):
            self._left = torch.empty(max(num_bytes, _PIECE_BYTES), dtype=torch.uint8)
            use_huge_pages(self._library, self._left)
        cut, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return cut.view(dtype)[:size]


def use_huge_pages(library: ctypes.CDLL, tensor: Tensor) -> None:
    """Ask for them wherever the contiguous `tensor` was not written yet; the system may decline."""
    library.loraplex_use_huge_pages(tensor.data_ptr(), tensor.nbytes)
