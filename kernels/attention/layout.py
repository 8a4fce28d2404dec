"""Builds the attention layout of a step on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from loraplex.kernels.attention.metadata import AttentionMeta


def build_attention_meta(
    *,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
    device: torch.device,
) -> AttentionMeta:
    """Lay out a flat batch of sequences. The leading ones with one query token are its decodes.

    Args:
        query_lens: [num_seqs], tokens of each sequence in this step, at least 1.
        context_lens: [num_seqs], keys that each sequence already has in the cache.
        block_ids: each sequence's block table; it covers context and query.
        block_size: tokens of a block.
        device: where the tensors go.
    """
    query = np.asarray(query_lens, dtype=np.int64)
    context = np.asarray(context_lens, dtype=np.int64)
    assert (query > 0).all(), "every sequence of a step computes a token"
    table = _block_table(block_ids)
    start = np.concatenate(([0], np.cumsum(query)))
    sequence = np.repeat(np.arange(len(query)), query)
    position = context[sequence] + np.arange(start[-1]) - start[sequence]
    block = table[sequence, position // block_size]
    assert (block >= 0).all(), "a sequence's blocks do not cover its tokens"
    return AttentionMeta(
        query_start_loc=torch.from_numpy(start.astype(np.int32)).to(device),
        seq_lens=torch.from_numpy((context + query).astype(np.int32)).to(device),
        block_table=torch.from_numpy(table.astype(np.int32)).to(device),
        slot_mapping=torch.from_numpy(block * block_size + position % block_size).to(device),
        num_decodes=int(np.logical_and.accumulate(query == 1).sum()),
        max_query_len=int(query.max()),
        max_seq_len=int((context + query).max()),
    )


def _block_table(block_ids: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    table = np.full((len(block_ids), max(map(len, block_ids))), -1, dtype=np.int64)
    for row, ids in zip(table, block_ids, strict=True):
        row[: len(ids)] = ids
    return table
