"""Repacks the 4-bit weights of checkpoints, exactly, into `W4Weight`.

The formats, for `in` rows and `out` columns; eight values are packed in an int32, the first in the low bits:

| | qweight | qzeros | scales | order of rows |
|---|---|---|---|---|
| GPTQ | [in / 8, out], eight rows a word | [groups, out / 8], eight columns a word | [groups, out] | `g_idx [in]` |
| AWQ (GEMM) | [in, out / 8], columns 0 2 4 6 1 3 5 7 | [groups, out / 8], likewise | [groups, out] | as they are |

GPTQ's first version stores every zero less one, taken off the whole word: a zero of 0 has borrowed from its neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.kernels.quant.metadata import NIBBLES, W4Weight

_AWQ_PLACE = [0, 4, 1, 5, 2, 6, 3, 7]  # of each column in its word
_ONE_PER_NIBBLE = 0x11111111
WHOLE_COLUMN = -1  # as a group size: one group


def from_gptq(
    *, qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, group_size: int, version: int
) -> W4Weight:
    """A weight of GPTQ; `version` 1 (`gptq`) or 2 (`gptq_v2`). Act-order (`g_idx` unsorted) becomes `perm`.

    Raises:
        ValueError: the tensors do not fit each other, or the groups of `g_idx` are not of `group_size` rows each.
    """
    if version not in (1, 2):
        raise ValueError(f"there is no version {version} of GPTQ's format, only 1 and 2")
    _check_packed(qweight, qzeros)
    group_size = _rows_of_a_group(group_size, qweight.shape[0] * NIBBLES)
    perm = None if g_idx is None else _sort_by_group(g_idx, group_size)
    zeros = unpack_columns(qzeros + _ONE_PER_NIBBLE if version == 1 else qzeros)  # wraps, as its subtraction did
    if perm is not None:
        qweight = pack_rows(unpack_rows(qweight)[perm])
    return W4Weight(
        qweight=qweight.contiguous(),
        scales=scales.contiguous(),
        scaled_zeros=_scale_zeros(zeros, scales),
        group_size=group_size,
        perm=None if perm is None else perm.int(),
    )


def from_awq(*, qweight: Tensor, qzeros: Tensor, scales: Tensor, group_size: int) -> W4Weight:
    """A weight of AWQ's GEMM format.

    Raises:
        ValueError: the tensors do not fit each other.
    """
    _check_packed(qweight, qzeros)
    if qweight.shape[0] % NIBBLES:
        raise ValueError(f"{qweight.shape[0]} input features are not a multiple of {NIBBLES}")
    return W4Weight(
        qweight=pack_rows(_reorder_awq(unpack_columns(qweight))),
        scales=scales.contiguous(),
        scaled_zeros=_scale_zeros(_reorder_awq(unpack_columns(qzeros)), scales),
        group_size=_rows_of_a_group(group_size, qweight.shape[0]),
    )


def can_fuse(weights: Sequence[W4Weight]) -> bool:
    """Whether one weight can hold their outputs side by side: they read their input in one order and alike groups."""
    first = weights[0]
    return all(
        each.group_size == first.group_size
        and each.in_features == first.in_features
        and each.scales.dtype == first.scales.dtype
        and _same(each.perm, first.perm)
        for each in weights[1:]
    )


def fuse(weights: Sequence[W4Weight]) -> W4Weight:
    """Their outputs side by side, for `weights` that `can_fuse`."""
    assert can_fuse(weights), "weights of different groups or orders of rows"
    return W4Weight(
        qweight=torch.cat([each.qweight for each in weights], dim=1),
        scales=torch.cat([each.scales for each in weights], dim=1),
        scaled_zeros=torch.cat([each.scaled_zeros for each in weights], dim=1),
        group_size=weights[0].group_size,
        perm=weights[0].perm,
    )


def unpack_rows(packed: Tensor) -> Tensor:
    """int32 `[n, columns]` -> uint8 `[8 * n, columns]`."""
    return _nibbles(packed.unsqueeze(1), _shifts(packed).view(1, -1, 1)).flatten(0, 1)


def unpack_columns(packed: Tensor) -> Tensor:
    """int32 `[rows, n]` -> uint8 `[rows, 8 * n]`."""
    return _nibbles(packed.unsqueeze(2), _shifts(packed).view(1, 1, -1)).flatten(1, 2)


def pack_rows(values: Tensor) -> Tensor:
    """uint8 `[8 * n, columns]`, each below 16, -> int32 `[n, columns]`."""
    by_word = values.view(-1, NIBBLES, values.shape[1])
    packed = by_word[:, 0].int()
    for place in range(1, NIBBLES):
        packed |= by_word[:, place].int() << (4 * place)
    return packed


def _nibbles(words: Tensor, shifts: Tensor) -> Tensor:
    return ((words >> shifts) & 0xF).to(torch.uint8)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(0, 4 * NIBBLES, 4, dtype=torch.int32, device=like.device)


def _reorder_awq(values: Tensor) -> Tensor:
    return values.view(len(values), -1, NIBBLES)[:, :, _AWQ_PLACE].flatten(1, 2)


def _rows_of_a_group(group_size: int, in_features: int) -> int:
    return in_features if group_size == WHOLE_COLUMN else min(group_size, in_features)


def _sort_by_group(g_idx: Tensor, group_size: int) -> Tensor | None:
    """The order that makes the groups of all rows ascend; None when they do."""
    perm = torch.argsort(g_idx, stable=True)
    ascending = torch.arange(len(g_idx), device=g_idx.device)
    if not torch.equal(g_idx[perm].long(), ascending // group_size):
        raise ValueError(f"g_idx does not cut {len(g_idx)} rows into groups of {group_size}")
    return None if torch.equal(perm, ascending) else perm


def _scale_zeros(zeros: Tensor, scales: Tensor) -> Tensor:
    if zeros.shape != scales.shape:
        raise ValueError(f"qzeros hold {list(zeros.shape)} zeros, but there are {list(scales.shape)} scales")
    return zeros.float() * scales.float()


def _check_packed(qweight: Tensor, qzeros: Tensor) -> None:
    for name, tensor in (("qweight", qweight), ("qzeros", qzeros)):
        if tensor.dtype != torch.int32 or tensor.dim() != 2:
            raise ValueError(f"{name} must be an int32 matrix, not {tensor.dtype} {list(tensor.shape)}")


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
