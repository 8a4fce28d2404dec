from __future__ import annotations

from typing import Any

import pytest

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.sampling_checks import check_sampling_params
from loraplex.engine.sampling_params import SamplingParams


@pytest.mark.parametrize("token_id", [-1, 100, 1 << 40])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_a_token_outside_the_vocabulary_is_refused_by_name(field: str, token_id: int) -> None:
    values: dict[str, Any] = {"logit_bias": {token_id: 1.0}, "stop_token_ids": (5, token_id)}
    params = SamplingParams(**{field: values[field]})
    with pytest.raises(InvalidRequestError, match=f"{field} names token {token_id}; .* between 0 and 99") as caught:
        check_sampling_params(params, 100)
    assert caught.value.param == field


def test_the_whole_vocabulary_is_allowed() -> None:
    check_sampling_params(SamplingParams(logit_bias={0: 1.0, 99: -1.0}, stop_token_ids=(0, 99)), 100)
