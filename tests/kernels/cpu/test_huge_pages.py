from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.kernels.cpu import huge_pages

SMAPS = Path("/proc/self/smaps")
HAS_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage").exists()


def flags_of(address: int) -> list[str]:
    """The kernel's flags of the mapping that holds the address."""
    is_within = False
    for line in SMAPS.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            is_within = start <= address < end
        elif is_within and first == "VmFlags:":
            return rest
    raise AssertionError("is mapped nowhere")


@pytest.mark.parametrize("shape", [(0, 8), (3, 5), (30, 7, 8, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_and_large_memory_is_zero_and_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = huge_pages.zeros(*shape, dtype=dtype)
    assert torch.equal(pool, torch.zeros(shape, dtype=dtype))
    pool.fill_(1)
    assert pool.float().sum() == pool.numel()


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_large_memory_asks_for_huge_pages() -> None:
    pool = huge_pages.zeros(8 << 20, dtype=torch.float32)
    assert "hg" in flags_of(pool.data_ptr() + pool.nbytes // 2)
