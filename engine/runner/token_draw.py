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
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.random_numbers import uniforms
from loraplex.engine.runner.ranking import ranking_keys, top_token_ids
from loraplex.engine.runner.to_device import to_device

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


class Draw(NamedTuple):
    """Tokens on the device, and in which rows they are final; the others keep more tokens than were ranked."""

    token_ids: Tensor  # int64 [R]
    is_decided: Tensor  # bool [R]


def draw_tokens(logits: Tensor, params: DrawParams) -> Draw:
    """Draw from finite float32 `logits [R, V]`, without waiting for the device.

    A row that is not finite gets an arbitrary token of the vocabulary. One that is not decided wants `draw_ranked`.
    """
    is_prefix = (params.top_k < logits.shape[-1]) | (params.top_p < 1)
    if is_prefix.all():
        return _draw_from_prefix(logits, params)
    if not is_prefix.any():
        return _draw_from_all(logits, params)
    tokens = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    is_decided = torch.empty(logits.shape[0], dtype=torch.bool, device=logits.device)
    for rows, draw in ((np.flatnonzero(~is_prefix), _draw_from_all), (np.flatnonzero(is_prefix), _draw_from_prefix)):
        places = to_device(rows, logits.device)
        tokens[places], is_decided[places] = draw(logits[places], params.take(rows))
    return Draw(tokens, is_decided)


def draw_ranked(logits: Tensor, params: DrawParams) -> Tensor:
    """The same for rows with top-k or top-p, with the whole vocabulary ranked: int64 `[R]`, all of them final."""
    return _draw_among(ranking_keys(logits), _weights(logits, params), params, logits.shape[-1]).token_ids


def _draw_from_all(logits: Tensor, params: DrawParams) -> Draw:
    cumulated = _weights(logits, params).cumsum(dim=-1, dtype=torch.float64)
    tokens = _first_above(cumulated, _on(logits, params.uniform) * cumulated[:, -1])
    return Draw(tokens.clamp_(max=logits.shape[-1] - 1), torch.ones_like(tokens, dtype=torch.bool))


def _draw_from_prefix(logits: Tensor, params: DrawParams) -> Draw:
    num_candidates = min(NUM_CANDIDATES, int(params.top_k.max()))
    return _draw_among(ranking_keys(logits), _weights(logits, params), params, num_candidates)


def _weights(logits: Tensor, params: DrawParams) -> Tensor:
    """Probabilities relative to the most likely token's, after min-p: float32 `[R, V]`."""
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    weights = shifted.div_(_on(logits, params.temperature).unsqueeze(-1)).exp_()
    if params.min_p.any():
        weights.mul_(weights >= _on(logits, params.min_p).unsqueeze(-1))
    return weights


def _draw_among(keys: Tensor, weights: Tensor, params: DrawParams, num_candidates: int) -> Draw:
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
    return Draw(_at(token_ids, places.clamp(max=num_candidates - 1)), is_decided)


def _first_above(cumulated: Tensor, thresholds: Tensor) -> Tensor:
    """Index of the first of `cumulated [R, N]` above `thresholds [R]`, each below the row's last: int64 `[R]`."""
    return torch.searchsorted(cumulated, thresholds.unsqueeze(-1), right=True).squeeze(-1)


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values.gather(-1, places.unsqueeze(-1)).squeeze(-1)


def _on(tensor: Tensor, values: NDArray[np.generic]) -> Tensor:
    return to_device(values, tensor.device)
