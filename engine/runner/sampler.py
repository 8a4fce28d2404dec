"""Chooses the next token of every row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.logit_edits import apply_logit_bias, forbid_early_end
from loraplex.engine.runner.penalties import Penalties, has_penalties
from loraplex.engine.runner.row_pieces import row_pieces
from loraplex.engine.runner.to_device import to_device
from loraplex.engine.runner.token_draw import Draw, DrawParams, draw_ranked, draw_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingTokens:
    """Chosen tokens that are still on the device. A row without a decision needs a second, wider draw."""

    logits: Tensor  # [R, V], edited; they must not change before `finish`
    requests: Sequence[Request]
    token_ids: Tensor  # int64 [R]
    is_decided: Tensor  # bool [R]

    def finish(self, token_ids: NDArray[np.int64], is_decided: NDArray[np.bool_]) -> list[int]:
        """The tokens, given what this holds as copied to the host. Few nuclei need anything of the device again."""
        tokens = token_ids.copy()
        undecided = np.flatnonzero(~is_decided)
        for piece in row_pieces(len(undecided), self.logits.device):
            rows = undecided[piece]
            params = DrawParams.of([self.requests[row] for row in rows], vocab_size=self.logits.shape[-1])
            logits = self.logits[to_device(rows, self.logits.device)]
            tokens[rows] = draw_ranked(logits, params).numpy(force=True)
        result: list[int] = tokens.tolist()
        return result


class Sampler:
    """Greedy and random sampling, vectorised over rows; a row pays only for what it asks for.

    The order is vLLM's: `logit_bias`, penalties, temperature, min-p, top-k, top-p; `min_tokens` acts last on the
    logits, so that no bias undoes it. A row's choice depends on its logits, its request and nothing else.
    """

    def __init__(self) -> None:
        self._penalties = Penalties()

    def sample(self, logits: Tensor, requests: Sequence[Request], largest: Tensor | None = None) -> list[int]:
        """Return the next token id of each request from finite `logits [R, V]`, which may be overwritten.

        Edits and draws compute in float32. `largest`, int64 `[R]`, is the first place of each row's largest value,
        where that is known.
        """
        pending = self.start(logits, requests, largest)
        return pending.finish(pending.token_ids.numpy(force=True), pending.is_decided.numpy(force=True))

    def start(self, logits: Tensor, requests: Sequence[Request], largest: Tensor | None = None) -> PendingTokens:
        """The same without waiting for the device; what it says of a row that is not finite has no meaning."""
        if largest is not None and all(map(_takes_the_likeliest, requests)):
            self._penalties.forget()
            return PendingTokens(
                logits=logits,
                requests=requests,
                token_ids=largest,
                is_decided=torch.ones_like(largest, dtype=torch.bool),
            )
        logits = logits.float()
        edits = (
            apply_logit_bias(logits, requests),
            self._penalties.apply(logits, requests),
            forbid_early_end(logits, requests),
        )
        token_ids, is_decided = _choose(logits, requests, None if any(edits) else largest)
        return PendingTokens(logits=logits, requests=requests, token_ids=token_ids, is_decided=is_decided)


def _takes_the_likeliest(request: Request) -> bool:
    params = request.sampling_params
    return (
        params.is_greedy
        and not params.logit_bias
        and not has_penalties(params)
        and request.num_output_tokens >= params.min_tokens
    )


def _choose(logits: Tensor, requests: Sequence[Request], largest: Tensor | None) -> Draw:
    drawn = np.flatnonzero([not request.sampling_params.is_greedy for request in requests])
    if len(drawn) == len(requests):
        return _drawn(logits, requests)
    # The most likely tokens; the lowest id among equals, which `argmax` documents.
    token_ids = logits.argmax(dim=-1) if largest is None else largest.clone()
    is_decided = torch.ones_like(token_ids, dtype=torch.bool)
    if len(drawn):
        rows = to_device(drawn, logits.device)
        token_ids[rows], is_decided[rows] = _drawn(logits[rows], [requests[row] for row in drawn.tolist()])
    return Draw(token_ids, is_decided)


def _drawn(logits: Tensor, requests: Sequence[Request]) -> Draw:
    pieces = list(row_pieces(len(requests), logits.device))
    draws = [
        draw_tokens(logits[piece], DrawParams.of(requests[piece], vocab_size=logits.shape[-1])) for piece in pieces
    ]
    return Draw(torch.cat([draw.token_ids for draw in draws]), torch.cat([draw.is_decided for draw in draws]))
