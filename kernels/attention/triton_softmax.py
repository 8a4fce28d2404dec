"""The loop over a sequence's keys that decode and prefill share: attention with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q: tl.tensor,
    position: tl.tensor,
    state: tl.tuple,
    first: int,
    last: int,
    kv: tl.tuple,
    table_row: tl.tensor,
    scale_log2e: float,
    cache_strides: tl.tuple,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr = False,
    WINDOW: tl.constexpr = 0,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the keys `first` to `last` (excluded) of one sequence, on top of what was attended to before.

    Nothing outside of them is loaded. Without MASKED every row sees all of them. With it a row sees the keys
    position[i] - WINDOW < j <= position[i] (WINDOW 0 = no window), and what it does not see is in no product.

    Semantics, for row i and the keys j it has seen: scores[j] = scale * q[i] . key[j],
    numerator[i, d] = sum over j of exp(scores[j] - max) * value[j, d], denominator[i] = sum over j of
    exp(scores[j] - max), and largest[i] = max in units of log2(e); 0, 0 and -inf where none is seen.

    Shape:
        q: [rows, dims], dims a power of two, zero from HEAD_DIM on.
        position: int32 [rows], in the sequence; unused without MASKED.
        state: numerator, float32 [rows, dims]; denominator, largest, float32 [rows].
        kv: keys and values, [num_blocks, BLOCK_SIZE, HEAD_DIM] of one head, both with the given strides.
        table_row: int32 [max_blocks], block ids of the sequence.
    """
    numerator, denominator, largest = state
    for start in range(first, last, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        is_token = token < last
        k, v = _load_tile(kv, table_row, token, is_token, cache_strides, q.shape[1], HEAD_DIM, BLOCK_SIZE)
        seen = _is_seen(token, is_token, position, MASKED, WINDOW)
        scores = tl.where(seen, tl.dot(q, k, input_precision="ieee") * scale_log2e, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet would compute -inf - -inf.
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        share = tl.exp2(scores - reference[:, None])
        if MASKED:
            v, share = _take_out_poison(v, share, seen)
        kept = tl.exp2(largest - reference)
        numerator = tl.dot(share.to(v.dtype), v, numerator * kept[:, None], input_precision="ieee")
        denominator = denominator * kept + tl.sum(share, 1)
        largest = new_largest
    return numerator, denominator, largest


@triton.jit
def nothing_seen(ROWS: tl.constexpr, DIMS: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """What to begin with: numerator, denominator and largest score."""
    numerator = tl.zeros((ROWS, DIMS), dtype=tl.float32)
    return numerator, tl.zeros((ROWS,), dtype=tl.float32), tl.full((ROWS,), float("-inf"), dtype=tl.float32)


@triton.jit
def quotient(numerator: tl.tensor, denominator: tl.tensor) -> tl.tensor:
    """`numerator / denominator`, zero where nothing was seen; NaN stays NaN."""
    return numerator / tl.where(denominator == 0.0, 1.0, denominator)


@triton.jit
def _load_tile(
    kv: tl.tuple,
    table_row: tl.tensor,
    token: tl.tensor,
    is_token: tl.tensor,
    cache_strides: tl.tuple,
    BLOCK_D: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The keys [dims, tokens] and values [tokens, dims], zero where there are none."""
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    block = tl.load(table_row + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    place = block * cache_strides[0] + token % BLOCK_SIZE * cache_strides[1]
    k = tl.load(kv[0] + place[None, :] + dim[:, None], mask=is_token[None, :] & is_dim[:, None], other=0.0)
    v = tl.load(kv[1] + place[:, None] + dim[None, :], mask=is_token[:, None] & is_dim[None, :], other=0.0)
    return k, v


@triton.jit
def _is_seen(
    token: tl.tensor, is_token: tl.tensor, position: tl.tensor, MASKED: tl.constexpr, WINDOW: tl.constexpr
) -> tl.tensor:
    """[rows, tokens], or [1, tokens] without MASKED."""
    seen = is_token[None, :]
    if MASKED:
        seen = seen & (token[None, :] <= position[:, None])
    if MASKED and WINDOW > 0:
        seen = seen & (token[None, :] > position[:, None] - WINDOW)
    return seen


@triton.jit
def _take_out_poison(v: tl.tensor, share: tl.tensor, seen: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """No product of what a row does not see: a value that is not finite makes the share of who sees it NaN instead."""
    is_finite = tl.abs(v.to(tl.float32)) < float("inf")
    is_poisoned = tl.min(is_finite.to(tl.int32), 1) == 0
    return tl.where(is_finite, v, 0.0), tl.where(seen & is_poisoned[None, :], float("nan"), share)
