"""What runs before the first request covers every kind of step, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.runner.warm_up import warm_up, warm_up_batches
from tests.engine.runner.driver import load
from tests.helpers import make_checkpoint


@pytest.mark.parametrize(("max_num_batched_tokens", "num_blocks"), [(1, 4), (2, 4), (3, 4), (2048, 1), (2048, 8)])
def test_every_kind_of_step_runs_within_the_budgets(
    tmp_path: Path, max_num_batched_tokens: int, num_blocks: int
) -> None:
    folder = make_checkpoint(tmp_path)
    model = load(folder)
    slots = SlotTensors.allocate(
        build_base_spec(folder), num_slots=1, slot_rank=8, dtype=model.dtype, device=model.device
    )
    runner = ModelRunner(model, model.allocate_kv_caches(num_blocks, 16), slots.pools, block_size=16)
    budgets = {"block_size": 16, "num_blocks": num_blocks, "max_num_batched_tokens": max_num_batched_tokens}
    warm_up(runner, **budgets)
    batches = list(warm_up_batches(**budgets))
    assert runner.num_eager_steps == len(batches) == 4
    assert all(batch.num_tokens <= max_num_batched_tokens for batch in batches)
    assert {entry.slots is None for batch in batches for entry in batch.scheduled} == {True, False}
    if max_num_batched_tokens > 2:
        assert {entry.num_tokens > 1 for batch in batches for entry in batch.scheduled} == {True, False}
