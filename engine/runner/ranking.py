"""One order of a row's tokens for everybody who ranks them: falling score, and the lower id first among equals."""

from __future__ import annotations

import torch
from torch import Tensor

_ID_BITS = 32
_ID_MASK = (1 << _ID_BITS) - 1
_MAGNITUDE_BITS = 0x7FFF_FFFF


def ranking_keys(scores: Tensor) -> Tensor:
    """Map finite float32 `scores [R, V]` to int64 `[R, V]` that are distinct within a row; larger ranks higher.

    `topk` leaves the order of equal values open; half-precision logits tie all the time. The upper half of a key is
    the score's bit pattern, made monotonic as a signed integer; the lower half grows as the token id falls.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which must tie with it
    bits = bits ^ ((bits >> 31) & _MAGNITUDE_BITS)
    vocab_size = scores.shape[-1]
    tie_breaks = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    return bits.to(torch.int64).bitwise_left_shift_(_ID_BITS).bitwise_or_(tie_breaks)


def top_token_ids(keys: Tensor, k: int) -> Tensor:
    """Token ids of the `k` largest `keys [R, V]` of every row, falling: int64 `[R, k]`."""
    vocab_size = keys.shape[-1]
    return vocab_size - 1 - (keys.topk(k, dim=-1).values & _ID_MASK)


def token_ranks(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Rank of `token_ids [R]` in their rows, 1 = the highest score: int64 `[R]`."""
    own = keys.gather(-1, token_ids.unsqueeze(-1))
    return (keys > own).sum(dim=-1) + 1
