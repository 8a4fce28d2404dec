"""The loop over a sequence's keys that decode and prefill share: attention with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q: tl.tensor,
    position: tl.tensor,
    first: int,
    last: int,
    key: tl.tensor,
    value: tl.tensor,
    table_row: tl.tensor,
    kv_head: int,
    scale_log2e: float,
    stride_block: int,
    stride_offset: int,
    stride_kv_head: int,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the keys `first` to `last` (excluded) of one sequence.

    Nothing outside of them is loaded. A key that a row does not see takes part in no product whose result the row
    keeps: its score is replaced by -inf before the softmax.

    Semantics, for row i and the keys j it sees (position[i] - WINDOW < j <= position[i]; WINDOW 0 = no window):
    scores[j] = scale * q[i] . key[j]; returned are numerator[i, d] = sum over j of exp(scores[j] - max) * value[j, d],
    denominator[i] = sum over j of exp(scores[j] - max), and max[i] in units of log2(e); 0, 0 and -inf where none is
    seen.

    Shape:
        q: [rows, BLOCK_D], zero from HEAD_DIM on.
        position: int32 [rows], in the sequence.
        key, value: [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM], both with the given strides.
        table_row: int32 [max_blocks], block ids of the sequence.
    """
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    numerator = tl.zeros((q.shape[0], BLOCK_D), dtype=tl.float32)
    denominator = tl.zeros((q.shape[0],), dtype=tl.float32)
    largest = tl.full((q.shape[0],), float("-inf"), dtype=tl.float32)
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_token = token < last
        block = tl.load(table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        offset = token % BLOCK_SIZE
        place = block * stride_block + offset * stride_offset + kv_head * stride_kv_head
        k = tl.load(key + place[None, :] + dim[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2e
        seen = is_token[None, :] & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would compute -inf - -inf.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        share = tl.exp2(scores - reference[:, None])
        kept = tl.exp2(largest - reference)
        v = tl.load(value + place[:, None] + dim[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0)
        numerator = tl.dot(share.to(v.dtype), v, numerator * kept[:, None], input_precision="ieee")
        denominator = denominator * kept + tl.sum(share, 1)
        largest = new_largest
    return numerator, denominator, largest


@triton.jit
def quotient(numerator: tl.tensor, denominator: tl.tensor) -> tl.tensor:
    """`numerator / denominator`, zero where nothing was seen; NaN stays NaN."""
    return numerator / tl.where(denominator == 0.0, 1.0, denominator)
