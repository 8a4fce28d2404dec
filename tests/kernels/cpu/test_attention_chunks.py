"""However a prompt is cut into steps, its tokens get the same bits; in each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.kernels.attention.helpers import PagedBatch, create_paged_batch
from tests.kernels.cpu.helpers import TARGETS, create_cpu_backend, matrix_on

PROMPT_LEN = 133


@pytest.fixture(scope="module", autouse=True, params=TARGETS)
def on_cpu_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with matrix_on(create_cpu_backend(request.param)):
        yield


def run_step(prompt: PagedBatch, start: int, end: int) -> Tensor:
    """The tokens [start, end) of the only sequence; what comes after them is not in the cache yet."""
    step = PagedBatch(
        query_lens=[end - start],
        queries=[prompt.queries[0][start:end]],
        keys=[prompt.keys[0][:end]],
        values=[prompt.values[0][:end]],
        scale=prompt.scale,
        sliding_window=prompt.sliding_window,
    )
    return step.run()[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [34, 64])
@pytest.mark.parametrize("sliding_window", [None, 37])
@pytest.mark.parametrize("step_len", [5, 47])
def test_a_prompt_in_steps_equals_the_prompt_at_once(
    dtype: torch.dtype, head_dim: int, sliding_window: int | None, step_len: int
) -> None:
    prompt = create_paged_batch([(0, PROMPT_LEN)], dtype=dtype, head_dim=head_dim, sliding_window=sliding_window)
    steps = [run_step(prompt, start, min(start + step_len, PROMPT_LEN)) for start in range(0, PROMPT_LEN, step_len)]
    assert torch.equal(torch.cat(steps), prompt.run()[0])
