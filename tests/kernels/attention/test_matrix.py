"""Distributions of lengths x odd batches x decode and prefill x window x dtype, against the slow loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.attention.helpers import create_paged_batch
from tests.kernels.oracle import assert_close

DISTRIBUTIONS = ("identical", "distinct", "uniform", "zipf", "skewed")


def lengths(kind: str, num_seqs: int) -> list[int]:
    """Tokens of each sequence, this step's included."""
    rng = np.random.default_rng(3)
    match kind:
        case "identical":
            return [33] * num_seqs
        case "distinct":
            return [1 + 5 * sequence for sequence in range(num_seqs)]
        case "uniform":
            return [int(each) for each in rng.integers(1, 80, num_seqs)]
        case "zipf":
            return [min(int(each), 150) for each in rng.zipf(1.5, num_seqs)]
        case _:  # skewed: one long context among short ones
            return ([1] * num_seqs + [301])[-num_seqs:]


def tokens(kind: str, num_seqs: int, phase: str) -> list[tuple[int, int]]:
    """(context, query) of each sequence: one query token, all of them, or both kinds, decodes first."""
    all_lengths = lengths(kind, num_seqs)
    num_decodes = {"decode": num_seqs, "prefill": 0, "mixed": num_seqs // 2}[phase]
    return [
        (length - 1, 1) if sequence < num_decodes else (length // 3, length - length // 3)
        for sequence, length in enumerate(all_lengths)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliding_window", [None, 9])
@pytest.mark.parametrize("phase", ["decode", "prefill", "mixed"])
@pytest.mark.parametrize("num_seqs", [1, 3, 7, 16])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_the_matrix(kind: str, num_seqs: int, phase: str, sliding_window: int | None, dtype: torch.dtype) -> None:
    batch = create_paged_batch(
        tokens(kind, num_seqs, phase),
        num_heads=3,
        num_kv_heads=1,
        head_dim=18,
        block_size=7,
        dtype=dtype,
        sliding_window=sliding_window,
    )
    for actual, expected in zip(batch.run(), batch.expected(), strict=True):
        assert_close(actual, expected, dtype)
