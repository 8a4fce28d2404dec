"""Compiles, without a GPU, what the backend would compile at its first call: one JSON line a kernel on stdout.

    python -m tests.kernels.triton.aot 80

A driver that knows an architecture only stands in for the GPU's, and every launch ends after the compilation. So the
types, alignments and constants are those that Triton itself derives from the backend's calls. The tensors are on the
meta device, where reading a value raises: what compiles here does not wait for a device on the host. Needs a process
without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from loraplex.kernels.triton_backend import TritonBackend
from loraplex.kernels.triton_configs import EXPAND, SHRINK

META = torch.device("meta")
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, slots=True)
class CompileOnlyDriver:
    architecture: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Takes the place of `JITFunction.run`: compiles, reports a kernel once, launches nothing."""

    def __init__(self, architecture: int) -> None:
        driver.set_active(CompileOnlyDriver(architecture))
        self.architecture = architecture
        self.case = ""
        self._run = JITFunction.run
        self._seen: set[str] = set()

    def install(self) -> None:
        compiler = self

        def run(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = compiler._run(kernel, *args, grid=grid, warmup=True, **kwargs)
            compiler._report(kernel.__name__, compiled)
            return compiled

        JITFunction.run = run

    def _report(self, name: str, compiled: Any) -> None:
        if compiled.hash in self._seen:
            return
        self._seen.add(compiled.hash)
        line = {
            "kernel": name,
            "case": self.case,
            "architecture": self.architecture,
            "warps": compiled.metadata.num_warps,
            "shared": compiled.metadata.shared,
            **read_cubin(compiled.asm["cubin"]),
        }
        sys.stdout.write(json.dumps(line) + "\n")


def read_cubin(cubin: bytes) -> dict[str, object]:
    """Registers, bytes of stack, local loads and stores, and the tensor core instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _output("cuobjdump", "-res-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {
        "registers": int(found[1]),
        "stack": int(found[2]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "tensor_cores": sorted(set(re.findall(r"\bHG?MMA\.\w+", code))),
    }


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def cases(backend: TritonBackend, architecture: int) -> Iterator[str]:
    """Yields a case's name, then makes its calls: every entry of the table, for the dtypes that reach it."""
    for dtype, pool_dtype in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        itemsize = max(dtype.itemsize, pool_dtype.itemsize)
        widths = EXPAND[architecture, itemsize]
        for in_features, shrink in SHRINK[architecture, itemsize]:
            for out_features, expand in widths if in_features > 4096 else widths[:1]:
                yield f"{dtype} {pool_dtype} {shrink} {expand}"
                call_lora(backend, dtype, pool_dtype, in_features=in_features, out=[out_features, 1024, 1024])
    yield "float16 float16"
    call_lora(backend, FP16, FP16, in_features=576, out=[576])
    for dtype, heads, kv_heads, head_dim, window in (
        (BF16, 9, 3, 64, None),
        (BF16, 32, 8, 128, None),
        (BF16, 32, 8, 128, 4096),
        (BF16, 32, 32, 80, None),
        (BF16, 8, 1, 256, None),
        (FP32, 9, 3, 64, None),
        (FP32, 32, 8, 128, None),
        (FP32, 8, 4, 256, None),
    ):
        yield f"{dtype} heads {heads}/{kv_heads}x{head_dim} window {window}"
        call_attention(backend, dtype, heads, kv_heads, head_dim, window)
    for dtype, hidden, heads, kv_heads, head_dim in (
        (BF16, 576, 9, 3, 64),
        (BF16, 4096, 32, 8, 128),
        (FP32, 8192, 64, 8, 128),
    ):
        yield f"{dtype} hidden {hidden} heads {heads}/{kv_heads}"
        call_elementwise(backend, dtype, hidden, heads, kv_heads, head_dim)


def call_lora(
    backend: TritonBackend, dtype: torch.dtype, pool_dtype: torch.dtype, *, in_features: int, out: Sequence[int]
) -> None:
    projections = list(Projection)[: len(out)]
    slots = tuple(WeightedSlot(slot, 1.0) for slot in range(8))
    meta = build_lora_meta(
        np.zeros(40, dtype=np.int32),
        [SelectionSlots(slots, slots)],
        device=META,
        chunk_size=backend.lora_chunk_size,
    )
    pools = LoRAPools(
        lora_a={p: empty(1, 8, 8, in_features, dtype=pool_dtype) for p in projections},
        lora_b={p: empty(1, 8, 8, width, dtype=pool_dtype) for p, width in zip(projections, out, strict=True)},
        scaling=empty(1, len(Projection), 8, dtype=FP32),
    )
    x, y = empty(40, in_features, dtype=dtype), empty(40, sum(out), dtype=dtype)
    backend.lora_apply(x, y, pools, layer=0, projections=projections, meta=meta)


def call_attention(
    backend: TritonBackend, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    meta = build_attention_meta(
        query_lens=[1, 40], context_lens=[900, 3], block_ids=[range(60)] * 2, block_size=16, device=META
    )
    cache = KVCache(
        key=empty(60, 16, kv_heads, head_dim, dtype=dtype), value=empty(60, 16, kv_heads, head_dim, dtype=dtype)
    )
    key = empty(41, kv_heads, head_dim, dtype=dtype)
    backend.store_kv(key, key, cache, meta.slot_mapping)
    backend.paged_attention(empty(41, heads, head_dim, dtype=dtype), cache, meta, scale=0.1, sliding_window=window)


def call_elementwise(
    backend: TritonBackend, dtype: torch.dtype, hidden: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    x, weight = empty(5, hidden, dtype=dtype), empty(hidden, dtype=dtype)
    q, k = empty(5, heads, head_dim, dtype=dtype), empty(5, kv_heads, head_dim, dtype=dtype)
    cos = empty(5, head_dim, dtype=dtype)
    backend.rms_norm(x, weight, 1e-6)
    backend.add_rms_norm(x, x, weight, 1e-6)
    backend.rms_norm(q, empty(head_dim, dtype=dtype), 1e-6)
    backend.rotary(q, k, cos, cos)
    backend.silu_and_mul(empty(5, 2 * hidden, dtype=dtype))


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def main(architecture: int) -> None:
    compiler = Compiler(architecture)
    compiler.install()
    for name in cases(TritonBackend(architecture), architecture):
        compiler.case = name.replace("torch.", "")


if __name__ == "__main__":
    main(int(sys.argv[1]))
