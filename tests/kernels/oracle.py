"""Slow loops in float64 that anyone can check by eye: what the kernels are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots

# Largest absolute error over the largest absolute reference value.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def lora_delta(
    x: Tensor,
    pools: LoRAPools,
    *,
    layer: int,
    projections: Sequence[Projection],
    token_selection: Sequence[int],
    selections: Sequence[SelectionSlots],
) -> Tensor:
    """The delta of every row, `[T, sum of out_features]`, float64; zero for rows with selection -1."""
    return torch.cat(
        [_projection_delta(x, pools, layer, projection, token_selection, selections) for projection in projections],
        dim=-1,
    )


def _projection_delta(
    x: Tensor,
    pools: LoRAPools,
    layer: int,
    projection: Projection,
    token_selection: Sequence[int],
    selections: Sequence[SelectionSlots],
) -> Tensor:
    delta = torch.zeros(len(x), pools.lora_b[projection].shape[-1], dtype=torch.float64)
    for index, selection in enumerate(selections):
        rows = [row for row, of_row in enumerate(token_selection) if of_row == index]
        for slot_id, weight in selection.attention if projection.is_attention else selection.mlp:
            lora_a = pools.lora_a[projection][layer, slot_id].double()
            lora_b = pools.lora_b[projection][layer, slot_id].double()
            scaling = weight * pools.scaling[layer, projection, slot_id].double()
            delta[rows] += scaling * (x[rows].double() @ lora_a.T) @ lora_b
    return delta


def attend(q: Tensor, key: Tensor, value: Tensor, *, scale: float, sliding_window: int | None) -> Tensor:
    """One sequence: `q [n, heads, head_dim]` are the last n positions of `key, value [length, kv_heads, head_dim]`."""
    output = torch.zeros(q.shape, dtype=torch.float64)
    group_size = q.shape[1] // key.shape[1]
    for row in range(len(q)):
        position = len(key) - len(q) + row
        first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
        for head in range(q.shape[1]):
            keys = key[first : position + 1, head // group_size].double()
            scores = scale * keys @ q[row, head].double()
            output[row, head] = scores.softmax(0) @ value[first : position + 1, head // group_size].double()
    return output


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Within the dtype's tolerance of the largest expected value."""
    assert actual.isfinite().all()
    bound = TOLERANCE[dtype] * max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)
