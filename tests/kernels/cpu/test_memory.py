"""Weights of any size share large pieces of memory, and never a byte."""

from __future__ import annotations

from itertools import pairwise

import torch

from loraplex.kernels.cpu.memory import WeightMemory
from tests.kernels.cpu.helpers import create_cpu_backend


def test_cuts_are_on_cache_lines_and_apart() -> None:
    memory = WeightMemory(create_cpu_backend().library)
    sizes = (1, 3, 1000, 40 << 20, 40 << 20, 100 << 20, 7)
    cuts = [memory.empty(size, torch.bfloat16) for size in sizes]
    assert [len(cut) for cut in cuts] == list(sizes)
    assert all(cut.data_ptr() % 64 == 0 for cut in cuts)
    spans = sorted((cut.data_ptr(), cut.data_ptr() + cut.nbytes) for cut in cuts)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_small_weights_share_a_piece_which_lives_as_long_as_they_do() -> None:
    memory = WeightMemory(create_cpu_backend().library)
    first, second = memory.empty(64, torch.float32).fill_(1), memory.empty(64, torch.float32).fill_(2)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    del memory, first
    assert second.eq(2).all()
