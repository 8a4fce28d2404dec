"""The sampler's definition, one row and one token at a time, in float64 Python."""

from __future__ import annotations

import math

from loraplex.engine.request import Request
from loraplex.engine.runner.random_numbers import uniforms


def edited_logits(logits: list[float], request: Request) -> list[float]:
    """Logits after bias, penalties and min_tokens, by the definitions of transformers and OpenAI."""
    params = request.sampling_params
    edited = [value + params.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    for token in set(request.token_ids):
        positive = edited[token] > 0
        edited[token] = (
            edited[token] / params.repetition_penalty if positive else edited[token] * params.repetition_penalty
        )
    for token in set(request.output_token_ids):
        edited[token] -= params.frequency_penalty * request.output_token_ids.count(token)
        edited[token] -= params.presence_penalty
    if request.num_output_tokens < params.min_tokens:
        for token in {*request.eos_token_ids, *params.stop_token_ids}:
            edited[token] = -math.inf
    return edited


def kept_tokens(logits: list[float], request: Request) -> list[tuple[int, float]]:
    """(token, weight) of everything that may be drawn, ranked."""
    params = request.sampling_params
    highest = max(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [(token, math.exp((logits[token] - highest) / params.temperature)) for token in ranked]
    kept = [(token, weight) for token, weight in kept if weight >= params.min_p]
    kept = kept[: params.top_k or len(kept)]
    mass = sum(weight for _, weight in kept)
    nucleus: list[tuple[int, float]] = []
    held = 0.0
    for token, weight in kept:
        if nucleus and held >= params.top_p * mass:
            break
        nucleus.append((token, weight))
        held += weight
    return nucleus


def sample_one(logits: list[float], request: Request) -> int:
    """The token of the row."""
    edited = edited_logits(logits, request)
    params = request.sampling_params
    if params.temperature == 0:
        return min(range(len(edited)), key=lambda token: (-edited[token], token))
    kept = kept_tokens(edited, request)
    if not 0 < params.top_k < len(logits) and params.top_p == 1:
        kept.sort()
    threshold = float(uniforms([request.seed], [request.num_output_tokens])[0]) * sum(weight for _, weight in kept)
    held = 0.0
    for token, weight in kept:
        held += weight
        if held > threshold:
            return token
    raise AssertionError("the cumulated weight must exceed the threshold")
