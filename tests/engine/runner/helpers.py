"""Requests for the runner's tests."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from loraplex.adapters.ref import BASE
from loraplex.engine.request import Request
from loraplex.engine.sampling_params import SamplingParams

_NUMBERS = count()


def create_request(
    *,
    prompt: Sequence[int] = (1,),
    output: Sequence[int] = (),
    seed: int = 0,
    eos: frozenset[int] = frozenset(),
    max_tokens: int = 16,
    request_id: str | None = None,
    **params: Any,
) -> Request:
    """A running request with some output already; `params` are fields of SamplingParams."""
    return Request(
        request_id=request_id or f"request-{next(_NUMBERS)}",
        prompt_token_ids=list(prompt),
        token_ids=[*prompt, *output],
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=seed,
        eos_token_ids=eos,
        selection=BASE,
        arrival_time=0.0,
    )
