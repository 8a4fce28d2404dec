"""Checks of sampling parameters that need the model's vocabulary. Pure Python, for the scheduler's side."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.sampling_params import SamplingParams


def check_sampling_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequestError when a parameter names a token that the model does not have.

    The runner indexes logits with these ids, so every way into the engine calls this before a request is accepted.
    """
    check_token_ids("logit_bias", params.logit_bias, vocab_size)
    check_token_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def check_token_ids(param: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequestError for the first that is no token of the model; `param` says whose ids they are."""
    outside = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
    if outside:
        raise InvalidRequestError(
            f"{param} names token {outside[0]}; this model's token ids lie between 0 and {vocab_size - 1}", param=param
        )
