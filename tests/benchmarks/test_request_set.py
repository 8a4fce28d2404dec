"""The requests that everybody answers stay the same ones, token for token."""

from __future__ import annotations

import hashlib
from collections import Counter

from benchmarks.request_set import request_set, single_stream_set, warm_up_set


def lengths(count: int) -> list[int]:
    return [len(request.prompt_token_ids) for request in request_set(count)]


def test_s64_has_the_lengths_and_tokens_that_published_figures_were_taken_with() -> None:
    requests = request_set(64)
    tokens = ",".join(str(token) for request in requests for token in request.prompt_token_ids)
    assert Counter(lengths(64)) == {32: 18, 128: 22, 512: 24}
    assert requests[0].prompt_token_ids[:3] == [28846, 20367, 11297]
    assert (
        hashlib.sha256(tokens.encode()).hexdigest()
        == "8792a6990ee24bf3a40716c4ae3d2fbaf250c78a7572efc8ead55020052ef8af"
    )
    assert sum(request.output_tokens for request in requests) == 64 * 64


def test_s16_is_the_beginning_of_s64() -> None:
    assert request_set(16) == request_set(64)[:16]
    assert sum(lengths(16)) == 4352


def test_requests_go_through_the_adapters_in_turn() -> None:
    assert [request.adapter(8) for request in request_set(16)] == [*range(8), *range(8)]


def test_what_warms_up_is_not_measured() -> None:
    measured = {tuple(request.prompt_token_ids) for request in [*request_set(64), *single_stream_set(8)]}
    warming = warm_up_set(num_adapters=64)
    assert {request.adapter(64) for request in warming} == set(range(64))
    assert measured.isdisjoint(tuple(request.prompt_token_ids) for request in warming)


def test_the_single_stream_asks_short_prompts_outside_of_s64() -> None:
    prompts = [request.prompt_token_ids for request in single_stream_set(8)]
    assert {len(prompt) for prompt in prompts} == {32}
    assert all(prompt not in [request.prompt_token_ids for request in request_set(64)] for prompt in prompts)
