"""Padded decode batches through the Triton kernels in the interpreter. Run by `test_decode_graphs_interpreted.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.runner.decode_graphs import DecodeGraphs, EagerRecorder
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot
from loraplex.kernels.triton_backend import TritonBackend
from tests.engine.runner.driver import BLOCK_SIZE, World, create_pools
from tests.engine.runner.helpers import create_request
from tests.helpers import make_checkpoint
from tests.kernels.triton.interpreter import prepare

prepare()
CPU = torch.device("cpu")
LENGTHS = (1, 3, 5)


def slots_of(*slot_ids: int) -> SelectionSlots:
    slots = tuple(WeightedSlot(slot_id, 1.0) for slot_id in slot_ids)
    return SelectionSlots(slots, slots)


@pytest.mark.parametrize("selections", [(None, None, None), (slots_of(0), None, slots_of(2, 1))])
def test_padding_changes_no_token_and_no_key(tmp_path: Path, selections: tuple[SelectionSlots | None, ...]) -> None:
    folder = make_checkpoint(tmp_path, hidden_size=32, head_dim=16, intermediate_size=48, num_attention_heads=2)
    model = load_model(folder, read_model_config(folder), backend=TritonBackend(80), dtype=torch.float32, device=CPU)
    pools = create_pools(model, slot_rank=8)
    answers, caches = [], []
    for has_graphs in (False, True):
        world = World.over(
            model,
            pools,
            make_graphs=(
                lambda kv_caches: DecodeGraphs(
                    model, kv_caches, pools, EagerRecorder(), max_num_seqs=4, max_model_len=32, block_size=BLOCK_SIZE
                )
            )
            if has_graphs
            else None,
        )
        requests = [create_request(prompt=range(2, 2 + n), temperature=0.0, max_tokens=3, logprobs=1) for n in LENGTHS]
        slots = {request: each for request, each in zip(requests, selections, strict=True) if each is not None}
        answers.append(list(world.run(requests, slots=slots).values()))
        caches.append(world.kv_caches)
        assert (world.runner.num_replayed_steps > 0) is has_graphs
    for eager, replayed in zip(*answers, strict=True):
        assert eager.token_ids == replayed.token_ids
        assert [entry.logprob for entry in replayed.logprobs] == pytest.approx(
            [entry.logprob for entry in eager.logprobs], abs=1e-4
        )
    for eager_cache, cache in zip(*caches, strict=True):
        torch.testing.assert_close(cache.key, eager_cache.key, rtol=1e-4, atol=1e-4, equal_nan=True)
        torch.testing.assert_close(cache.value, eager_cache.value, rtol=1e-4, atol=1e-4, equal_nan=True)
