from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from loraplex.engine.runner.activation_memory import measure_peak_activations, profile_batches
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.scheduler_output import SchedulerOutput
from tests.engine.runner.driver import load
from tests.helpers import make_checkpoint

LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 512}


def peak_allocation(runner: ModelRunner, batch: SchedulerOutput) -> int:
    """Most bytes that were allocated at once during one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        runner.execute(batch)
    trace: Any = profiler.profiler
    live = peak = 0
    for event in trace.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"vocab_size": 5000},
        {"intermediate_size": 2048},
        {"max_position_embeddings": 4096, "intermediate_size": 64},
    ],
)
def test_the_bound_holds_for_the_largest_steps_and_is_not_idle(tmp_path: Path, shape: dict[str, Any]) -> None:
    model = load(make_checkpoint(tmp_path, **shape))
    max_model_len = model.config.max_position_embeddings
    bound = measure_peak_activations(model, block_size=4, max_model_len=max_model_len, **LIMITS)
    runner = ModelRunner(model, model.allocate_kv_caches(max_model_len // 4, 4), None, block_size=4)
    batches = profile_batches(block_size=4, max_model_len=max_model_len, **LIMITS)
    peak = max(peak_allocation(runner, batch) for batch in batches)
    assert bound / 16 < peak <= bound


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "lengths"),
    [
        (4, 64, 64, [[64], [16] * 4]),
        (4, 64, 16, [[16] * 4, [16] * 4]),
        (2, 64, 16, [[16] * 2, [16] * 2]),
        (8, 8, 100, [[8], [1] * 8]),
        (3, 100, 7, [[7] * 3, [7] * 3]),
    ],
)
def test_profile_batches_keep_every_limit(
    max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, lengths: list[list[int]]
) -> None:
    batches = profile_batches(
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    assert [[entry.num_tokens for entry in batch.scheduled] for batch in batches] == lengths
    for batch in batches:
        for entry in batch.scheduled:
            assert entry.is_sampled
            assert len(entry.request.block_ids) * 4 >= entry.num_tokens
