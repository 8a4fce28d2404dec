"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.runner.ranking import ranking_keys, token_ranks, top_token_ids
from loraplex.engine.runner.row_pieces import row_pieces


def compute_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Describe `token_ids[i]` and the `num_top[i]` most likely tokens at row i of `logits [R, V]`.

    `logits` are finite float32 and unmodified by sampling parameters. Values are natural logarithms in float32;
    equal ones rank by the lower token id.
    """
    described: list[TokenLogprobs] = []
    for piece in row_pieces(len(token_ids), logits.device):
        described += _describe(logits[piece], token_ids[piece], num_top[piece])
    return described


def _describe(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    chosen = torch.tensor(token_ids, device=logits.device)
    keys = ranking_keys(logits)
    ranks = token_ranks(keys, chosen).tolist()
    top_ids = top_token_ids(keys, min(max(num_top), logits.shape[-1]))
    del keys
    logprobs = logits.log_softmax(dim=-1)
    values = logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()
    tops = zip(top_ids.tolist(), logprobs.gather(-1, top_ids).tolist(), strict=True)
    return [
        TokenLogprobs(token_id, value, rank, tuple(zip(ids[:count], top_values[:count], strict=True)))
        for token_id, value, rank, count, (ids, top_values) in zip(token_ids, values, ranks, num_top, tops, strict=True)
    ]
