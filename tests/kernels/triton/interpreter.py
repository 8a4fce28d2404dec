"""Makes bfloat16 right in Triton's interpreter, and uninitialised memory NaN. For a process with TRITON_INTERPRET=1.

The interpreter keeps bfloat16 as its 16 bits in an integer array: products work on those integers, and a conversion
from float32 cuts bits off instead of rounding. GPUs do neither.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@cache
def prepare() -> None:
    """Call before the first kernel; again does nothing."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "set before triton is imported"
    original_dot, original_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return original_dot(self, a, b, total, *options)
        return TensorHandle(_widened(a) @ _widened(b) + total.data, total.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.bfloat16):
            return original_cast(self, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
        return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    # torch.empty then fills with NaN, so that reading what nobody wrote shows.
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()


def _widened(handle: Any) -> NDArray[np.float32]:
    if handle.dtype.scalar != tl.bfloat16:
        return np.asarray(handle.data, dtype=np.float32)
    return np.asarray((handle.data.astype(np.uint32) << 16).view(np.float32))
