"""The loop over a sequence's keys that decode and prefill share: attention with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q: tl.tensor,
    position: tl.tensor,
    numerator: tl.tensor,
    denominator: tl.tensor,
    largest: tl.tensor,
    first: int,
    last: int,
    key: tl.tensor,
    value: tl.tensor,
    table_row: tl.tensor,
    scale_log2e: float,
    stride_block: int,
    stride_offset: int,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the keys `first` to `last` (excluded) of one sequence, on top of what was attended to before.

    Nothing outside of them is loaded. Without MASKED every row sees all of them. With it a row sees the keys
    position[i] - WINDOW < j <= position[i] (WINDOW 0 = no window), and what it does not see is in no product: a score
    becomes -inf before the softmax, and a value that is not finite is taken out of the tile and makes the share of
    the rows that do see it NaN.

    Semantics, for row i and the keys j it has seen: scores[j] = scale * q[i] . key[j],
    numerator[i, d] = sum over j of exp(scores[j] - max) * value[j, d], denominator[i] = sum over j of
    exp(scores[j] - max), and largest[i] = max in units of log2(e); 0, 0 and -inf where none is seen.

    Shape:
        q: [rows, BLOCK_D], zero from HEAD_DIM on.
        position: int32 [rows], in the sequence; unused without MASKED.
        numerator: float32 [rows, BLOCK_D]. denominator, largest: float32 [rows].
        key, value: [num_blocks, BLOCK_SIZE, HEAD_DIM] of one head, both with the given strides.
        table_row: int32 [max_blocks], block ids of the sequence.
    """
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_token = token < last
        block = tl.load(table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
        place = block * stride_block + token % BLOCK_SIZE * stride_offset
        k = tl.load(key + place[None, :] + dim[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(value + place[:, None] + dim[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale_log2e
        seen = is_token[None, :]
        if MASKED:
            seen = seen & (token[None, :] <= position[:, None])
        if MASKED and WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would compute -inf - -inf.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        share = tl.exp2(scores - reference[:, None])
        if MASKED:
            is_finite = tl.abs(v.to(tl.float32)) < float("inf")
            v = tl.where(is_finite, v, 0.0)
            is_poisoned = tl.min(is_finite.to(tl.int32), 1) == 0
            share = tl.where(seen & is_poisoned[None, :], float("nan"), share)
        kept = tl.exp2(largest - reference)
        numerator = tl.dot(share.to(v.dtype), v, numerator * kept[:, None], input_precision="ieee")
        denominator = denominator * kept + tl.sum(share, 1)
        largest = new_largest
    return numerator, denominator, largest


@triton.jit
def quotient(numerator: tl.tensor, denominator: tl.tensor) -> tl.tensor:
    """`numerator / denominator`, zero where nothing was seen; NaN stays NaN."""
    return numerator / tl.where(denominator == 0.0, 1.0, denominator)
