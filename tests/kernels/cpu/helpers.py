"""The C++ backend for this processor and for the instruction sets of older ones, which it can run as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch

from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.backend import CpuBackend
from loraplex.kernels.cpu.build import NATIVE, build
from tests.kernels.attention import helpers as attention_helpers
from tests.kernels.lora import helpers as lora_helpers

CPU = torch.device("cpu")

_OLDER = {  # name -> what the processor must have, the compiler's name for it
    "avx512": ("avx512bw", "x86-64-v4"),
    "avx2": ("avx2", "x86-64-v3"),
    "scalar": ("sse2", "x86-64"),
}
_FEATURES = frozenset(Path("/proc/cpuinfo").read_text().split()) if sys.platform == "linux" else frozenset()
TARGETS: dict[str, tuple[str, ...]] = {
    "native": NATIVE,
    **{name: (f"-march={march}",) for name, (feature, march) in _OLDER.items() if feature in _FEATURES},
}


@cache
def create_cpu_backend(target: str = "native") -> CpuBackend:
    return CpuBackend(CPU, library=native.load(build(target=TARGETS[target])))


@contextmanager
def matrix_on(backend: CpuBackend) -> Iterator[None]:
    """The worlds of the other kernel tests run on this backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora_helpers, "BACKEND", backend)
        patch.setattr(attention_helpers, "BACKEND", backend)
        yield
