"""One request for several choices becomes several requests."""

from __future__ import annotations

from loraplex.engine.frontend.children import split_choices
from tests.engine.frontend.helpers import request


def test_children_follow_the_first_and_stay_in_the_range_of_seeds() -> None:
    largest = (1 << 63) - 1
    children = split_choices(request("r", params={"n": 3, "seed": largest, "prompt_logprobs": 1}))
    assert [child.request_id for child in children] == ["r-0", "r-1", "r-2"]
    assert [child.prefix_leader_id for child in children] == [None, "r-0", "r-0"]
    assert [child.sampling_params.seed for child in children] == [largest, -(1 << 63), -(1 << 63) + 1]
    assert [child.sampling_params.prompt_logprobs for child in children] == [1, None, None]
    assert {child.sampling_params.n for child in children} == {1}
