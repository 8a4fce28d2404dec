"""Draws one token per row by inverting the cumulative distribution, with one uniform number per token.

Tokens get the weight exp((logit - row maximum) / temperature), so the largest weight is 1 and nothing overflows,
however small the temperature. min-p zeroes weights below it. Without top-k and top-p, the weights are cumulated in
the order of token ids, and nothing is sorted. With them, tokens are ranked (falling logit, then id); both filters,
like min-p, keep a prefix of that order: top-k the first k, top-p the shortest prefix that holds `top_p` of the mass
which min-p and top-k left. The token drawn is the first whose cumulated weight exceeds uniform * kept mass.

Sums are float64, so that rounding moves a draw only where the uniform number lies within 1e-16 of a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.random_numbers import uniforms
from loraplex.engine.runner.ranking import ranking_keys, top_token_ids

# Ranked at first for a nucleus or a top-k; only the rows that keep more tokens are ranked whole.
NUM_CANDIDATES = 512

# A normal float32. At this temperature all but exact ties of the maximum have weight 0 already.
_MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """What R rows draw with, as host arrays `[R]`, so that choosing a path never waits for the device."""

    temperature: NDArray[np.float32]  # above 0
    min_p: NDArray[np.float32]
    top_k: NDArray[np.int64]  # the vocabulary's size when off
    top_p: NDArray[np.float64]
    uniform: NDArray[np.float64]  # in [0, 1)

    @classmethod
    def of(cls, requests: Sequence[Request], *, vocab_size: int) -> DrawParams:
        params = [request.sampling_params for request in requests]
        return cls(
            temperature=np.array([max(entry.temperature, _MIN_TEMPERATURE) for entry in params], dtype=np.float32),
            min_p=np.array([entry.min_p for entry in params], dtype=np.float32),
            top_k=np.array([min(entry.top_k or vocab_size, vocab_size) for entry in params], dtype=np.int64),
            top_p=np.array([entry.top_p for entry in params], dtype=np.float64),
            uniform=uniforms(
                [request.seed for request in requests], [request.num_output_tokens for request in requests]
            ),
        )

    def take(self, rows: NDArray[np.int64]) -> DrawParams:
        return DrawParams(
            temperature=self.temperature[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            uniform=self.uniform[rows],
        )


def draw_tokens(logits: Tensor, params: DrawParams) -> Tensor:
    """Draw from finite float32 `logits [R, V]`: int64 `[R]`."""
    is_prefix = (params.top_k < logits.shape[-1]) | (params.top_p < 1)
    if is_prefix.all():
        return _draw_from_prefix(logits, params)
    if not is_prefix.any():
        return _draw_from_all(logits, params)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for rows, draw in ((np.flatnonzero(~is_prefix), _draw_from_all), (np.flatnonzero(is_prefix), _draw_from_prefix)):
        places = torch.from_numpy(rows).to(logits.device)
        tokens[places] = draw(logits[places], params.take(rows))
    return tokens


def _draw_from_all(logits: Tensor, params: DrawParams) -> Tensor:
    cumulated = _weights(logits, params).cumsum(dim=-1, dtype=torch.float64)
    return _first_above(cumulated, _on(logits, params.uniform) * cumulated[:, -1])


def _draw_from_prefix(logits: Tensor, params: DrawParams) -> Tensor:
    weights = _weights(logits, params)
    keys = ranking_keys(logits)
    num_candidates = min(NUM_CANDIDATES, int(params.top_k.max()))
    tokens, is_decided = _draw_among(keys, weights, params, num_candidates)
    undecided = (~is_decided).nonzero().squeeze(-1)
    if len(undecided):
        whole, _ = _draw_among(
            keys[undecided], weights[undecided], params.take(undecided.numpy(force=True)), keys.shape[-1]
        )
        tokens[undecided] = whole
    return tokens


def _weights(logits: Tensor, params: DrawParams) -> Tensor:
    """Probabilities relative to the most likely token's, after min-p: float32 `[R, V]`."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = shifted.div_(_on(logits, params.temperature).unsqueeze(-1)).exp_()
    if params.min_p.any():
        weights.mul_(weights >= _on(logits, params.min_p).unsqueeze(-1))
    return weights


def _draw_among(keys: Tensor, weights: Tensor, params: DrawParams, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Draw from the best `num_candidates` tokens; also say in which rows these hold everything that is kept."""
    vocab_size = keys.shape[-1]
    top_k = _on(keys, params.top_k)
    token_ids = top_token_ids(keys, num_candidates)
    cumulated = weights.gather(-1, token_ids).cumsum(dim=-1, dtype=torch.float64)
    last_of_top_k = top_k.clamp(max=num_candidates) - 1
    mass = torch.where(top_k <= num_candidates, _at(cumulated, last_of_top_k), weights.sum(dim=-1, dtype=torch.float64))
    nucleus_mass = _on(keys, params.top_p) * mass
    last_of_nucleus = torch.searchsorted(cumulated, nucleus_mass.unsqueeze(-1)).squeeze(-1)
    last_kept = torch.minimum(last_of_nucleus, last_of_top_k)
    places = _first_above(cumulated, _on(keys, params.uniform) * _at(cumulated, last_kept))
    is_decided = (top_k <= num_candidates) | ((top_k == vocab_size) & (cumulated[:, -1] >= nucleus_mass))
    return _at(token_ids, places.clamp(max=num_candidates - 1)), is_decided


def _first_above(cumulated: Tensor, thresholds: Tensor) -> Tensor:
    """Index of the first of `cumulated [R, N]` above `thresholds [R]`, each below the row's last: int64 `[R]`."""
    return torch.searchsorted(cumulated, thresholds.unsqueeze(-1), right=True).squeeze(-1)


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(-1, places.unsqueeze(-1)).squeeze(-1)


def _on(tensor: Tensor, values: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(values).to(tensor.device)
