from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.request import Request
from loraplex.engine.runner import token_draw
from loraplex.engine.runner.row_pieces import MAX_ROWS
from loraplex.engine.runner.sampler import Sampler
from loraplex.engine.runner.token_draw import DrawParams, draw_tokens
from tests.engine.runner.helpers import create_request
from tests.engine.runner.sampling_oracle import edited_logits, kept_tokens, sample_one

VOCAB = 40


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return Sampler().sample(logits.clone(), requests)


def random_logits(rows: int, *, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 100.0]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB, 1000]),
        "top_p": st.sampled_from([1e-6, 0.1, 0.5, 0.93, 1.0]),
        "min_p": st.sampled_from([0.0, 0.01, 0.2, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.1, 0.0, 0.6]),
        "frequency_penalty": st.sampled_from([-0.4, 0.0, 0.9]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0, 7.0]), max_size=3),
        "min_tokens": st.sampled_from([0, 1, 4]),
        "stop_token_ids": st.sampled_from([(), (3,), (3, 5)]),
        "ignore_eos": st.booleans(),
    },
)

REQUESTS = st.builds(
    lambda prompt, output, seed, eos, params: create_request(
        prompt=prompt, output=output, seed=seed, eos=eos, **params
    ),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    st.lists(st.integers(0, VOCAB - 1), max_size=8),
    st.integers(-(1 << 63), (1 << 63) - 1),
    st.sampled_from([frozenset(), frozenset({2}), frozenset({2, 9})]),
    PARAMS,
)


@settings(max_examples=150, deadline=None, derandomize=True)  # float32 may part from the oracle once in a million
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=6), seed=st.integers(0, 1000), num_candidates=st.integers(1, 50)
)
def test_every_row_equals_the_one_row_oracle(requests: list[Request], seed: int, num_candidates: int) -> None:
    logits = random_logits(len(requests), seed=seed)
    with pytest.MonkeyPatch.context() as patch:  # so small a first ranking that both paths are walked
        patch.setattr(token_draw, "NUM_CANDIDATES", min(num_candidates, VOCAB))
        tokens = sample(logits, requests)
    assert tokens == [sample_one(row, request) for row, request in zip(logits.tolist(), requests, strict=True)]


@settings(max_examples=60, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=2, max_size=6), data=st.data())
def test_order_and_neighbours_change_no_row(requests: list[Request], data: st.DataObject) -> None:
    logits = random_logits(len(requests))
    order = data.draw(st.permutations(range(len(requests))))
    tokens = sample(logits, requests)
    assert sample(logits[list(order)], [requests[row] for row in order]) == [tokens[row] for row in order]
    assert [sample(logits[row : row + 1], [requests[row]])[0] for row in range(len(requests))] == tokens


@pytest.mark.parametrize("num_greedy", [0, 1, 5])
def test_greedy_takes_the_lowest_id_among_equals(num_greedy: int) -> None:
    logits = torch.zeros(6, VOCAB)
    logits[:, [7, 11, 30]] = 1.5
    requests = [create_request(temperature=0.0 if row < num_greedy else 1e-9, top_k=1) for row in range(6)]
    assert sample(logits, requests) == [7] * 6


def test_minus_zero_ties_with_zero() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 4], logits[0, 9] = -0.0, 0.0
    assert sample(logits, [create_request(top_k=1)]) == [4]


def test_top_k_of_equal_logits_keeps_the_lowest_ids() -> None:
    logits = torch.zeros(200, VOCAB)
    tokens = sample(logits, [create_request(seed=seed, top_k=3) for seed in range(200)])
    assert set(tokens) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [1e-45, 1e-20, 1e-9])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_a_tiny_temperature_draws_among_exact_maxima_only(temperature: float, truncation: dict[str, Any]) -> None:
    logits = random_logits(1, seed=4).repeat(64, 1)
    logits[:, [5, 21]] = logits.max() + 1e-3
    requests = [create_request(seed=seed, temperature=temperature, **truncation) for seed in range(64)]
    assert set(sample(logits, requests)) == {5, 21}


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.6},
        {"top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {"top_k": 9, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
    ],
)
def test_frequencies_follow_the_filtered_distribution(params: dict[str, Any]) -> None:
    draws = 8000
    logits = random_logits(1, seed=3, vocab=16)
    requests = [create_request(seed=seed, **params) for seed in range(draws)]
    counts = Counter(sample(logits.repeat(draws, 1), requests))
    kept = kept_tokens(logits[0].tolist(), requests[0])
    mass = sum(weight for _, weight in kept)
    expected = {token: draws * weight / mass for token, weight in kept}
    assert set(counts) <= set(expected)
    chi_square = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items() if mean >= 5)
    assert chi_square < 45  # above 99.98 % of the distribution with 15 degrees of freedom; the seeds are fixed


def test_positions_of_one_seed_follow_the_distribution() -> None:
    draws = 4000
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    requests = [create_request(seed=11, output=[0] * 3, max_tokens=draws)]
    counts: Counter[int] = Counter()
    for _ in range(draws):
        counts.update(sample(logits, requests))
        requests[0].token_ids.append(0)
    expected = torch.softmax(logits[0], dim=0) * draws
    chi_square = sum((counts[token] - float(expected[token])) ** 2 / float(expected[token]) for token in range(3))
    assert chi_square < 17  # 99.98 % with 2 degrees of freedom


def test_more_rows_than_one_draw_holds() -> None:
    rows = 2 * MAX_ROWS + 3
    logits = random_logits(rows)
    requests = [create_request(seed=row, temperature=float(row % 3)) for row in range(rows)]
    assert sample(logits, requests) == [
        sample_one(row, request) for row, request in zip(logits.tolist(), requests, strict=True)
    ]


def test_a_nucleus_larger_than_the_first_ranking_is_ranked_whole() -> None:
    vocab = 4 * token_draw.NUM_CANDIDATES
    logits = random_logits(40, vocab=vocab) * 0.01
    requests = [create_request(seed=row, top_p=0.97) for row in range(40)]
    requests += [create_request(seed=row, top_k=token_draw.NUM_CANDIDATES + 100, top_p=0.99) for row in range(40)]
    logits = logits.repeat(2, 1)
    tokens = sample(logits, requests)
    assert tokens == [sample_one(row, request) for row, request in zip(logits.tolist(), requests, strict=True)]


def test_min_tokens_hides_every_end_until_then() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[:, 2], logits[:, 3], logits[:, 9] = 9.0, 8.0, 7.0
    logits[:, 17] = 1.0
    ends: dict[str, Any] = {"eos": frozenset({2, 9}), "stop_token_ids": (3,), "temperature": 0.0, "min_tokens": 2}
    requests = [
        create_request(**ends),
        create_request(**ends, ignore_eos=True),
        create_request(**ends, logit_bias={2: 100.0}),
        create_request(**ends, output=[5, 5]),
    ]
    assert sample(logits, requests) == [17, 17, 17, 2]


def test_an_end_token_beyond_the_vocabulary_is_harmless() -> None:
    request = create_request(eos=frozenset({VOCAB + 5}), min_tokens=3, temperature=0.0)
    logits = random_logits(1)
    assert sample(logits, [request]) == [int(logits.argmax())]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_k", [0, 2])
def test_a_row_with_every_token_forbidden_still_yields_a_token(temperature: float, top_k: int) -> None:
    request = create_request(stop_token_ids=tuple(range(VOCAB)), min_tokens=3, temperature=temperature, top_k=top_k)
    assert 0 <= sample(random_logits(1), [request])[0] < VOCAB


@pytest.mark.parametrize("repetition_penalty", [5e-324, 1e-300, 1e300])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_extreme_repetition_penalties_yield_tokens(repetition_penalty: float, truncation: dict[str, Any]) -> None:
    request = create_request(prompt=range(VOCAB), repetition_penalty=repetition_penalty, **truncation)
    assert 0 <= sample(random_logits(1), [request])[0] < VOCAB


def test_bias_of_a_hundred_wins_or_bans() -> None:
    logits = random_logits(2)
    best = int(logits[1].argmax())
    requests = [
        create_request(temperature=0.0, logit_bias={13: 100.0}),
        create_request(logit_bias={best: -100.0}, seed=5),
    ]
    tokens = sample(logits, requests)
    assert tokens[0] == 13
    assert tokens[1] != best


@settings(max_examples=100, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=4), steps=st.lists(st.integers(0, VOCAB - 1), max_size=5))
def test_edited_logits_equal_the_oracle_step_after_step(requests: list[Request], steps: list[int]) -> None:
    sampler = Sampler()
    for step, token in enumerate([*steps, 0]):
        logits = random_logits(len(requests), seed=step)
        edited = logits.clone()
        sampler.sample(edited, requests)
        expected = torch.tensor(
            [edited_logits(row, request) for row, request in zip(logits.tolist(), requests, strict=True)]
        )
        expected = expected.clamp(min=torch.finfo(torch.float32).min)
        torch.testing.assert_close(edited, expected, rtol=1e-5, atol=1e-5)
        for request in requests[: 1 + step % 2]:  # the others miss a step
            request.token_ids.append(token)


def test_repetition_penalty_equals_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    request = create_request(prompt=[3, 4, 4, 8], output=[8, 1], repetition_penalty=1.7, temperature=0.0)
    logits = random_logits(1)
    edited = logits.clone()
    Sampler().sample(edited, [request])
    seen = torch.LongTensor([request.token_ids])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, torch.FloatTensor(logits.numpy().copy()))
    torch.testing.assert_close(edited, expected)


def test_a_new_request_under_an_old_id_starts_with_fresh_counts() -> None:
    sampler = Sampler()
    logits = torch.zeros(1, VOCAB)
    logits[0, 6], logits[0, 7] = 1.0, 0.9
    old = create_request(request_id="same", output=[6, 6], frequency_penalty=1.0, temperature=0.0)
    new = create_request(request_id="same", output=[7, 7], frequency_penalty=1.0, temperature=0.0)
    assert sampler.sample(logits.clone(), [old]) == [7]
    assert sampler.sample(logits.clone(), [new]) == [6]


def test_counts_are_kept_for_the_last_call_only() -> None:
    sampler = Sampler()
    requests = [create_request(presence_penalty=1.0) for _ in range(5)]
    sampler.sample(random_logits(5), requests)
    sampler.sample(random_logits(1), requests[3:4])
    assert list(sampler._penalties._counts) == requests[3:4]
    sampler.sample(random_logits(1), [create_request()])
    assert not sampler._penalties._counts


def test_plain_greedy_rows_leave_the_logits_alone() -> None:
    logits = random_logits(3)
    kept = logits.clone()
    tokens = Sampler().sample(logits, [create_request(temperature=0.0) for _ in range(3)])
    assert tokens == kept.argmax(dim=-1).tolist()
    assert torch.equal(logits, kept)


def test_one_uniform_number_is_compared_with_the_cumulated_softmax() -> None:
    from loraplex.engine.runner.random_numbers import uniforms

    logits = random_logits(300, vocab=1000)
    requests = [create_request(seed=row) for row in range(300)]
    numbers = uniforms(range(300), [0] * 300)
    cumulated = np.cumsum(torch.softmax(logits.double(), dim=-1).numpy(), axis=-1)
    expected = [int(np.searchsorted(row, number, side="right")) for row, number in zip(cumulated, numbers, strict=True)]
    assert sample(logits, requests) == expected


@pytest.mark.parametrize("truncation", [{}, {"top_k": 30}])
def test_the_smallest_number_draws_no_filtered_token(truncation: dict[str, Any]) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, :5] = -50.0
    params = DrawParams.of([create_request(min_p=0.5, **truncation)], vocab_size=VOCAB)
    params.uniform[0] = 0.0
    assert draw_tokens(logits, params).token_ids.tolist() == [5]


@pytest.mark.parametrize("truncation", [{}, {"top_k": 7}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_the_largest_number_draws_the_last_kept_token(truncation: dict[str, Any]) -> None:
    logits = random_logits(1)
    request = create_request(**truncation)
    kept = [token for token, _ in kept_tokens(logits[0].tolist(), request)]
    last = kept[-1] if "top_k" in truncation or "top_p" in truncation else max(kept)
    params = DrawParams.of([request], vocab_size=VOCAB)
    params.uniform[0] = 1 - 2.0**-53
    assert draw_tokens(logits, params).token_ids.tolist() == [last]


def test_what_is_known_of_the_largest_logits_holds_only_for_unedited_ones() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0], [1.0, 0.0, 0.5]])
    largest = logits.argmax(dim=-1)
    plain, biased = (create_request(temperature=0.0, logit_bias=bias) for bias in ({}, {1: -5.0}))
    assert Sampler().sample(logits.clone(), [plain, plain], largest) == [1, 0]
    assert Sampler().sample(logits.clone(), [biased, plain], largest) == [2, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logits_in_half_precision_are_computed_with_in_float32(temperature: float) -> None:
    logits = random_logits(3).to(torch.bfloat16)
    requests = [
        create_request(temperature=temperature, seed=1),
        create_request(temperature=temperature, seed=2, logit_bias={7: 1.0009765625}, presence_penalty=0.3),
        create_request(temperature=0.0),
    ]
    assert sample(logits, requests) == sample(logits.float(), requests)


def test_rows_that_only_want_the_likeliest_token_take_what_is_known() -> None:
    requests = [create_request(temperature=0.0), create_request(temperature=0.0)]
    assert Sampler().sample(random_logits(2), requests, torch.tensor([5, 6])) == [5, 6]
