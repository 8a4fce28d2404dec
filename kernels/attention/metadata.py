"""The layout of paged attention in a batch, built once per step and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMeta:
    """One flat batch of variable-length sequences; a decode is a sequence with one query token."""

    query_start_loc: Tensor  # int32 [num_seqs + 1]
    seq_lens: Tensor  # int32 [num_seqs]: keys after this step, the query tokens included
    block_table: Tensor  # int32 [num_seqs, max_blocks], -1 = unused, never read
    slot_mapping: Tensor  # int64 [num_tokens]: block_id * block_size + offset
    num_decodes: int  # sequences with one query token; they come first
    max_query_len: int
    max_seq_len: int

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The paged cache of one layer. Unwritten and freed places may hold anything, NaN included."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTransform:
    """What is done to the heads of queries and keys before attention."""

    q_norm: Tensor | None  # [head_dim], the weight of an RMSNorm of every head; None = there is none
    k_norm: Tensor | None
    eps: float  # of both norms
    cos: Tensor | None  # [T, head_dim]; None = no rotation
    sin: Tensor | None
