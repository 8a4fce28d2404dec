"""Edits of single logits that requests ask for: `logit_bias`, and no end before `min_tokens`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.to_device import to_device


def apply_logit_bias(logits: Tensor, requests: Sequence[Request]) -> bool:
    """Add every request's `logit_bias` to its row of `logits [R, V]`, in place; say whether there was any."""
    rows: list[int] = []
    token_ids: list[int] = []
    values: list[float] = []
    for row, request in enumerate(requests):
        bias = request.sampling_params.logit_bias
        rows.extend([row] * len(bias))
        token_ids.extend(bias.keys())
        values.extend(bias.values())
    if rows:
        logits[_places(rows, token_ids, logits)] += to_device(np.array(values, dtype=np.float32), logits.device)
    return bool(rows)


def forbid_early_end(logits: Tensor, requests: Sequence[Request]) -> bool:
    """Make the tokens that end a request unreachable, in place, until it has `min_tokens` of output.

    End tokens are out of reach also with `ignore_eos`. The lowest finite value stands for minus infinity, so that a
    row in which every token is forbidden still has a softmax. Says whether any was forbidden.
    """
    vocab_size = logits.shape[-1]
    rows: list[int] = []
    token_ids: list[int] = []
    for row, request in enumerate(requests):
        params = request.sampling_params
        if request.num_output_tokens < params.min_tokens:
            # A tokenizer's end token may lie beyond the model's vocabulary; stop_token_ids were checked.
            ends = [end for end in {*request.eos_token_ids, *params.stop_token_ids} if end < vocab_size]
            rows.extend([row] * len(ends))
            token_ids.extend(ends)
    if rows:
        logits[_places(rows, token_ids, logits)] = torch.finfo(logits.dtype).min
    return bool(rows)


def _places(rows: Sequence[int], token_ids: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    return to_device(np.array(rows), logits.device), to_device(np.array(token_ids), logits.device)
