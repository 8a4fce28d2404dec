"""The C++ backend for this processor and for the instruction sets of older ones, which it can run as well."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch

from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.backend import CpuBackend
from loraplex.kernels.cpu.build import NATIVE, build
from tests.kernels.attention import helpers as attention_helpers
from tests.kernels.lora import helpers as lora_helpers

CPU = torch.device("cpu")

TARGETS = {"native": NATIVE}
if platform.machine() == "x86_64":
    TARGETS |= {"avx2": ("-march=x86-64-v3",), "scalar": ("-march=x86-64",)}


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
