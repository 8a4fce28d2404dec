"""Repetition, presence and frequency penalties, for the rows that ask for them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.to_device import to_device
from loraplex.engine.sampling_params import SamplingParams


class Penalties:
    """Applies the penalties, and remembers which tokens occurred in the requests of the last call.

    Only requests of the last call are remembered: one that was not sampled for a step (preempted, say) is counted
    anew, so nothing has to be told that a request has ended.
    """

    def __init__(self) -> None:
        self._counts: dict[Request, TokenCounts] = {}

    def apply(self, logits: Tensor, requests: Sequence[Request]) -> bool:
        """Penalise `logits [R, V]` in place; row i belongs to `requests[i]`. Says whether there was any penalty.

        A token of the prompt or the output has its logit divided (if above 0) or multiplied by `repetition_penalty`
        (Keskar et al., 2019). Then a token of the output loses `frequency_penalty` times its count, and
        `presence_penalty` once.
        """
        rows = [row for row, request in enumerate(requests) if has_penalties(request.sampling_params)]
        self._counts = {requests[row]: self._counts_of(requests[row]) for row in rows}
        if rows:
            _penalise(logits, rows, [requests[row].sampling_params for row in rows], list(self._counts.values()))
        return bool(rows)

    def forget(self) -> None:
        """As after a call without penalties."""
        self._counts = {}

    def _counts_of(self, request: Request) -> TokenCounts:
        counts = self._counts.get(request) or TokenCounts(request.prompt_token_ids)
        counts.extend(request.token_ids[counts.num_tokens :])
        return counts


def has_penalties(params: SamplingParams) -> bool:
    """Whether any penalty would change a logit."""
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


class TokenCounts:
    """The distinct tokens of one request, and how often each occurs in its output."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.num_tokens = len(prompt_token_ids)
        self.token_ids = array("q", dict.fromkeys(prompt_token_ids))
        self.output_counts = array("q", bytes(8 * len(self.token_ids)))
        self._places = {token_id: place for place, token_id in enumerate(self.token_ids)}

    def extend(self, output_token_ids: Sequence[int]) -> None:
        """Count further tokens of the output."""
        for token_id in output_token_ids:
            place = self._places.setdefault(token_id, len(self.token_ids))
            if place == len(self.token_ids):
                self.token_ids.append(token_id)
                self.output_counts.append(0)
            self.output_counts[place] += 1
        self.num_tokens += len(output_token_ids)


def _penalise(
    logits: Tensor, rows: Sequence[int], params: Sequence[SamplingParams], counts: Sequence[TokenCounts]
) -> None:
    """Edit the (row, token) places that occurred, in float64 and clamped, so that no penalty makes Inf or NaN."""
    device = logits.device
    repeats = np.array([len(entry.token_ids) for entry in counts])
    place = (
        to_device(np.repeat(np.array(rows), repeats), device),
        to_device(np.concatenate([np.asarray(entry.token_ids) for entry in counts]), device),
    )
    output_counts = to_device(np.concatenate([np.asarray(entry.output_counts) for entry in counts]), device)

    def spread(values: Sequence[float]) -> Tensor:
        return to_device(np.repeat(np.array(values, dtype=np.float64), repeats), device)

    repetition = spread([entry.repetition_penalty for entry in params])
    values = logits[place].double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([entry.frequency_penalty for entry in params]) * output_counts
    values -= spread([entry.presence_penalty for entry in params]) * (output_counts > 0)
    limits = torch.finfo(logits.dtype)
    logits[place] = values.clamp_(limits.min, limits.max).to(logits.dtype)
