from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.runner.logprobs import compute_logprobs


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 29), st.integers(0, 20)), min_size=1, max_size=5),
    seed=st.integers(0, 100),
    is_coarse=st.booleans(),
)
def test_equal_to_log_softmax_ranked_by_value_then_id(rows: list[tuple[int, int]], seed: int, is_coarse: bool) -> None:
    logits = torch.randn(len(rows), 30, generator=torch.Generator().manual_seed(seed)) * 3
    if is_coarse:
        logits = logits.round()  # many ties, both zeros among them
    expected = logits.log_softmax(dim=-1)
    described = compute_logprobs(logits, [token for token, _ in rows], [top for _, top in rows])
    for row, (entry, (token, num_top)) in enumerate(zip(described, rows, strict=True)):
        values = logits[row].tolist()
        ranked = sorted(range(30), key=lambda other: (-values[other], other))
        assert entry.token_id == token
        assert entry.logprob == float(expected[row, token])
        assert entry.rank == ranked.index(token) + 1
        assert entry.top == tuple((other, float(expected[row, other])) for other in ranked[:num_top])


def test_more_top_logprobs_than_the_vocabulary_has() -> None:
    (entry,) = compute_logprobs(torch.tensor([[0.0, 1.0, 0.5]]), [2], [20])
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert entry.rank == 2


def test_no_rows_ask_for_nothing() -> None:
    assert compute_logprobs(torch.empty(0, 8), [], []) == []


def test_one_row_equals_the_same_row_in_a_crowd() -> None:
    logits = torch.randn(70, 500, generator=torch.Generator().manual_seed(0))
    crowd = compute_logprobs(logits, list(range(70)), [3] * 70)
    for row in (0, 33, 69):
        assert compute_logprobs(logits[row : row + 1], [row], [3]) == [crowd[row]]
