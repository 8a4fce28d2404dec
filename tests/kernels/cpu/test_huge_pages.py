from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from loraplex.kernels.cpu import huge_pages

CPU = torch.device("cpu")
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
def test_small_and_large_memory_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    memory = huge_pages.empty(*shape, dtype=dtype, device=CPU)
    assert torch.equal(memory.fill_(1), torch.ones(shape, dtype=dtype))


@pytest.mark.skipif(not HAS_HUGE_PAGES, reason="this kernel has no transparent huge pages")
def test_large_memory_asks_for_huge_pages() -> None:
    memory = huge_pages.empty(8 << 20, dtype=torch.float32, device=CPU)
    assert "hg" in flags_of(memory.data_ptr() + memory.nbytes // 2)


def test_cuts_for_weights_are_on_cache_lines_and_apart() -> None:
    memory = huge_pages.WeightMemory()
    sizes = (1, 3, 1000, 40 << 20, 40 << 20, 100 << 20, 7)
    cuts = [memory.empty(size, torch.bfloat16) for size in sizes]
    assert [len(cut) for cut in cuts] == list(sizes)
    assert all(cut.data_ptr() % 64 == 0 for cut in cuts)
    spans = sorted((cut.data_ptr(), cut.data_ptr() + cut.nbytes) for cut in cuts)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_small_weights_share_a_piece_which_lives_as_long_as_they_do() -> None:
    memory = huge_pages.WeightMemory()
    first, second = memory.empty(64, torch.float32).fill_(1), memory.empty(64, torch.float32).fill_(2)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del memory, first
    assert second.eq(2).all()
