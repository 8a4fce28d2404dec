"""Chooses the next token of every row of logits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from loraplex.engine.request import Request
from loraplex.engine.runner.logit_edits import apply_logit_bias, forbid_early_end
from loraplex.engine.runner.penalties import Penalties
from loraplex.engine.runner.row_pieces import row_pieces
from loraplex.engine.runner.token_draw import DrawParams, draw_tokens


class Sampler:
    """Greedy and random sampling, vectorised over rows; a row pays only for what it asks for.

    The order is vLLM's: `logit_bias`, penalties, temperature, min-p, top-k, top-p; `min_tokens` acts last on the
    logits, so that no bias undoes it. A row's choice depends on its logits, its request and nothing else.
    """

    def __init__(self) -> None:
        self._penalties = Penalties()

    def sample(self, logits: Tensor, requests: Sequence[Request], largest: Tensor | None = None) -> list[int]:
        """Return the next token id of each request from finite float32 `logits [R, V]`, which are overwritten.

        `largest`, int64 `[R]`, is the first place of each row's largest value, where that is known.
        """
        edits = (
            apply_logit_bias(logits, requests),
            self._penalties.apply(logits, requests),
            forbid_early_end(logits, requests),
        )
        drawn = [row for row, request in enumerate(requests) if not request.sampling_params.is_greedy]
        if len(drawn) == len(requests):
            return _drawn(logits, requests)
        largest = _largest(logits) if largest is None or any(edits) else largest
        return _mixed(logits, requests, drawn, largest) if drawn else largest.tolist()


def _largest(logits: Tensor) -> Tensor:
    """The most likely tokens; the lowest id among equals, which `argmax` documents."""
    return logits.argmax(dim=-1)


def _drawn(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    token_ids: list[int] = []
    for piece in row_pieces(len(requests), logits.device):
        params = DrawParams.of(requests[piece], vocab_size=logits.shape[-1])
        token_ids += draw_tokens(logits[piece], params).tolist()
    return token_ids


def _mixed(logits: Tensor, requests: Sequence[Request], drawn: Sequence[int], largest: Tensor) -> list[int]:
    token_ids: list[int] = largest.tolist()
    for row, token_id in zip(drawn, _drawn(logits[drawn], [requests[row] for row in drawn]), strict=True):
        token_ids[row] = token_id
    return token_ids
