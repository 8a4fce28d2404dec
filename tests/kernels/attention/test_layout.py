from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import AttentionMeta


def build(query_lens: Sequence[int], context_lens: Sequence[int], block_ids: Sequence[Sequence[int]]) -> AttentionMeta:
    return build_attention_meta(
        query_lens=query_lens,
        context_lens=context_lens,
        block_ids=block_ids,
        block_size=4,
        device=torch.device("cpu"),
    )


def test_a_worked_example() -> None:
    meta = build([1, 1, 5], [3, 6, 2], [[2], [1, 3], [5, 9]])
    assert meta.query_start_loc.tolist() == [0, 1, 2, 7]
    assert meta.seq_lens.tolist() == [4, 7, 7]
    assert meta.block_table.tolist() == [[2, -1], [1, 3], [5, 9]]
    assert meta.slot_mapping.tolist() == [2 * 4 + 3, 3 * 4 + 2, 5 * 4 + 2, 5 * 4 + 3, 9 * 4, 9 * 4 + 1, 9 * 4 + 2]
    assert (meta.num_decodes, meta.max_query_len, meta.max_seq_len) == (2, 5, 7)


def test_only_the_leading_single_tokens_are_decodes() -> None:
    assert build([1, 3, 1], [0, 0, 0], [[0], [1], [2]]).num_decodes == 1
    assert build([2], [0], [[0]]).num_decodes == 0
    assert build([1], [0], [[0]]).num_decodes == 1


def test_blocks_that_do_not_cover_the_tokens_are_a_fault_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="do not cover"):
        build([1, 3], [3, 2], [[2, 5], [1]])
