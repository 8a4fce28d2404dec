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
from loraplex.kernels.attention.metadata import HeadTransform, KVCache
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from loraplex.kernels.quant.metadata import W4Weight
from loraplex.kernels.triton_backend import TritonBackend
from loraplex.kernels.triton_configs import EXPAND, SHRINK, W4, W4_MAX_ROWS

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
        ptx = compiled.asm["ptx"]
        cubins = {self.architecture: compiled.asm["cubin"]}
        if self.architecture == 80:
            cubins[86] = assemble_for_86(ptx)
        for architecture, cubin in cubins.items():
            line = {
                "kernel": name,
                "case": self.case,
                "architecture": architecture,
                "warps": compiled.metadata.num_warps,
                "shared": compiled.metadata.shared,
                "tensor_cores": sorted(set(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)", ptx))),
                **read_cubin(cubin),
            }
            sys.stdout.write(json.dumps(line) + "\n")


def assemble_for_86(ptx: str) -> bytes:
    """Triton makes the same PTX for 8.6 as for 8.0, with the same shared memory; what registers it takes differs."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source, tempfile.NamedTemporaryFile() as cubin:
        source.write(ptx.replace(".target sm_80", ".target sm_86"))
        source.flush()
        command = [str(TOOLS / "ptxas"), "--gpu-name=sm_86", "-lineinfo", source.name, "-o", cubin.name]
        subprocess.run(command, check=True)
        return cubin.read()


def read_cubin(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of stack, which is where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    return {"registers": int(found[1]), "stack": int(found[2])}


def cases(backend: TritonBackend, architecture: int) -> Iterator[str]:
    """Yields a case's name, then makes its calls: every entry of the table, for the dtypes that reach it."""
    yield from lora_cases(backend, architecture)
    yield from quant_cases(backend, architecture)
    yield from attention_cases(backend)
    for dtype, hidden, heads, kv_heads, head_dim in ((BF16, 576, 9, 3, 64), (FP32, 8192, 64, 8, 128)):
        yield f"{dtype} hidden {hidden} heads {heads}/{kv_heads}"
        call_elementwise(backend, dtype, hidden, heads, kv_heads, head_dim)


def lora_cases(backend: TritonBackend, architecture: int) -> Iterator[str]:
    for dtype, pool_dtype in ((BF16, BF16), (BF16, FP32), (FP32, FP32)):
        itemsize = max(dtype.itemsize, pool_dtype.itemsize)
        widths = EXPAND[architecture, itemsize]
        rows = SHRINK[architecture, itemsize]
        for in_features, shrink in rows if dtype != pool_dtype or itemsize == 2 else rows[-1:]:
            for out_features, expand in widths if in_features > 4096 else widths[:1]:
                yield f"{dtype} {pool_dtype} {shrink} {expand}"
                out = [out_features, 1024, 1024]
                call_lora(backend, dtype, pool_dtype, in_features=in_features, out=out)


def quant_cases(backend: TritonBackend, architecture: int) -> Iterator[str]:
    """With one split and with several; with groups in order and permuted."""
    for dtype in (BF16, FP32):
        for num_rows, config in W4[architecture, dtype.itemsize]:
            for out_features, act_order in ((1024, True), (14336, False)):
                yield f"{dtype} {config}"
                call_w4(backend, dtype, num_rows, out_features, act_order=act_order)
        yield f"{dtype} more rows"
        call_w4(backend, dtype, W4_MAX_ROWS + 1, 1024, act_order=True)


def attention_cases(backend: TritonBackend) -> Iterator[str]:
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


def call_w4(backend: TritonBackend, dtype: torch.dtype, num_rows: int, out_features: int, *, act_order: bool) -> None:
    weight = W4Weight(
        qweight=empty(4096 // 8, out_features, dtype=torch.int32),
        scales=empty(32, out_features, dtype=FP16),
        scaled_zeros=empty(32, out_features, dtype=FP32),
        group_size=128,
        perm=empty(4096, dtype=torch.int32) if act_order else None,
    )
    bias = empty(out_features, dtype=dtype)
    backend.linear(empty(num_rows, 4096, dtype=dtype), backend.prepare_w4(weight, bias, dtype))


def call_attention(
    backend: TritonBackend, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    meta = build_attention_meta(
        query_lens=[1, 40], context_lens=[900, 3], block_ids=[range(60)] * 2, block_size=16, device=META
    )
    cache = KVCache(
        key=empty(60, 16, kv_heads, head_dim, dtype=dtype), value=empty(60, 16, kv_heads, head_dim, dtype=dtype)
    )
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
    cache = KVCache(
        key=empty(9, 16, kv_heads, head_dim, dtype=dtype), value=empty(9, 16, kv_heads, head_dim, dtype=dtype)
    )
    slots = empty(5, dtype=torch.int64)
    backend.store_kv(k, k, cache, slots)
    qkv, norm = empty(5, (heads + 2 * kv_heads) * head_dim, dtype=dtype), empty(head_dim, dtype=dtype)
    for each in (norm, None):
        transform = HeadTransform(q_norm=each, k_norm=each, eps=1e-6, cos=cos, sin=cos)
        backend.norm_rotary_store(qkv, transform, cache, slots)


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def main(architecture: int) -> None:
    compiler = Compiler(architecture)
    compiler.install()
    for name in cases(TritonBackend(architecture), architecture):
        compiler.case = name.replace("torch.", "")


if __name__ == "__main__":
    main(int(sys.argv[1]))
