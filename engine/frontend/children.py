"""The requests that one request for n choices becomes."""

from __future__ import annotations

from dataclasses import replace

from loraplex.engine.messages import GenerateRequest

_SEED_SPAN = 1 << 64


def split_choices(request: GenerateRequest) -> list[GenerateRequest]:
    """One request per choice, each with n = 1: `ID` itself for one choice, `ID-0` .. `ID-(n-1)` for several.

    Choice i draws with seed + i. The others follow the first, whose prompt they share, and only the first answers
    for the prompt's logprobs.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [_child(request, index) for index in range(params.n)]


def _child(request: GenerateRequest, index: int) -> GenerateRequest:
    params = request.sampling_params
    return replace(
        request,
        request_id=f"{request.request_id}-{index}",
        sampling_params=replace(
            params,
            n=1,
            seed=None if params.seed is None else _wrap(params.seed + index),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        ),
        prefix_leader_id=None if index == 0 else f"{request.request_id}-0",
    )


def _wrap(seed: int) -> int:
    """Into a signed 64-bit integer."""
    return (seed + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2
