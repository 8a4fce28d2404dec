"""Every kernel and configuration compiles for every architecture, without spills, within the shared memory of all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

from loraplex.kernels.triton_configs import ARCHITECTURES, DECODE, EXPAND, PREFILL, SHRINK, W4, nearest_architecture

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only"),
    pytest.mark.timeout(900),
]
GPUS = (80, 86, 90)  # 8.6 takes the table of 8.0
SHARED_MEMORY_LIMIT = 99 * 1024  # bytes a program, compute capability 8.6, 8.9 and 12.0; others have more
KERNELS = {
    "shrink_kernel",
    "expand_kernel",
    "decode_kernel",
    "merge_kernel",
    "prefill_kernel",
    "store_kv_kernel",
    "norm_rotary_store_kernel",
    "w4_kernel",
    "sum_splits_kernel",
    "dequantize_kernel",
    "rms_norm_kernel",
    "rotary_kernel",
    "silu_and_mul_kernel",
}
ON_TENSOR_CORES = ("shrink_kernel", "expand_kernel", "decode_kernel", "prefill_kernel", "w4_kernel")


class Compiled(TypedDict):
    kernel: str
    case: str
    architecture: int
    warps: int
    shared: int
    registers: int
    stack: int  # bytes; nothing but spilled registers takes any
    tensor_cores: list[str]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Compiled]]:
    """By architecture of the GPU; the compilers run side by side."""
    processes = {
        architecture: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.triton.aot", str(architecture)],
            cwd=ROOT,
            env=_environment(tmp_path_factory.mktemp(f"sm_{architecture}")),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for architecture in ARCHITECTURES
    }
    lines = [line for process in processes.values() for line in _lines(process)]
    return {gpu: [line for line in lines if line["architecture"] == gpu] for gpu in GPUS}


def _environment(cache: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return {**environment, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}


def _lines(process: subprocess.Popen[str]) -> list[Compiled]:
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.parametrize("architecture", GPUS)
def test_every_kernel_is_compiled(compiled: dict[int, list[Compiled]], architecture: int) -> None:
    assert {each["kernel"] for each in compiled[architecture]} == KERNELS


@pytest.mark.parametrize("architecture", GPUS)
def test_every_configuration_is_compiled(compiled: dict[int, list[Compiled]], architecture: int) -> None:
    """bfloat16 stands for two bytes an element, float32 for four."""
    cases = " ".join(each["case"] for each in compiled[architecture])
    table = nearest_architecture(divmod(architecture, 10))
    for by_name in (SHRINK, EXPAND, W4):
        for itemsize in (2, 4):
            assert all(str(config) in cases for _, config in by_name[table, itemsize])
    for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
        for rows in (DECODE[table, itemsize], PREFILL[table, itemsize]):
            head_dims = [
                int(each["case"].split("x")[-1].split()[0])
                for each in compiled[architecture]
                if each["kernel"] == "prefill_kernel" and each["case"].startswith(dtype)
            ]
            served = {next(index for index, (largest, _) in enumerate(rows) if dim <= largest) for dim in head_dims}
            assert served == set(range(len(rows)))


@pytest.mark.parametrize("architecture", GPUS)
def test_nothing_spills(compiled: dict[int, list[Compiled]], architecture: int) -> None:
    assert [each for each in compiled[architecture] if each["stack"]] == []


@pytest.mark.parametrize("architecture", GPUS)
def test_shared_memory_suffices_on_every_gpu(compiled: dict[int, list[Compiled]], architecture: int) -> None:
    assert [each for each in compiled[architecture] if each["shared"] > SHARED_MEMORY_LIMIT] == []


@pytest.mark.parametrize("architecture", GPUS)
def test_16_bit_products_run_on_tensor_cores(compiled: dict[int, list[Compiled]], architecture: int) -> None:
    products = [
        each
        for each in compiled[architecture]
        if each["kernel"] in ON_TENSOR_CORES and not each["case"].startswith("float32")
    ]
    assert [each for each in products if not each["tensor_cores"]] == []
