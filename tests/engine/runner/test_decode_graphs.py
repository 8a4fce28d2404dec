"""Decode steps on padded static buffers give what the same steps give op by op, bit for bit.

No graph is captured on a CPU: a replay computes again what was recorded, from the static buffers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.request import Request
from loraplex.engine.runner.decode_graphs import DecodeGraphs, EagerRecorder
from loraplex.engine.runner.graph_inputs import GraphShape
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from tests.engine.runner.driver import BLOCK_SIZE, World, create_pools
from tests.engine.runner.helpers import create_request
from tests.engine.runner.rowwise_backend import RowwiseBackend
from tests.helpers import make_checkpoint

CPU = torch.device("cpu")
NUM_SLOTS = 6
MAX_NUM_SEQS = 6
SELECTIONS = [
    None,
    SelectionSlots((WeightedSlot(0, 1.0),), (WeightedSlot(3, 1.0),)),
    SelectionSlots((WeightedSlot(2, 0.5), WeightedSlot(1, -1.0)), ()),  # nothing in the MLP
    SelectionSlots(tuple(WeightedSlot(slot, 1.0) for slot in (5, 4, 3, 2, 1)), (WeightedSlot(0, 2.0),)),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    folder = make_checkpoint(tmp_path_factory.mktemp("base"), max_position_embeddings=2048, hidden_size=32, head_dim=8)
    config = read_model_config(folder)
    return load_model(folder, config, backend=RowwiseBackend(CPU), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def pools(model: DecoderModel) -> LoRAPools:
    return create_pools(model, num_slots=NUM_SLOTS)


class CountingRecorder(EagerRecorder):
    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replays = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1

        def replay() -> None:
            self.num_replays += 1
            compute()

        return replay


def create_graphs(
    model: DecoderModel, pools: LoRAPools | None, kv_caches: list[KVCache], recorder: EagerRecorder | None = None
) -> DecodeGraphs:
    return DecodeGraphs(
        model,
        kv_caches,
        pools,
        recorder or EagerRecorder(),
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=2048,
        block_size=BLOCK_SIZE,
    )


def worlds(model: DecoderModel, pools: LoRAPools) -> tuple[World, World]:
    """One that replays, and one that runs every step op by op."""
    return World.over(model, pools, make_graphs=lambda caches: create_graphs(model, pools, caches)), World.over(
        model, pools
    )


def requests_of(drawn: Sequence[tuple[int, int, int, dict[str, Any]]]) -> dict[Request, SelectionSlots | None]:
    return {
        create_request(
            prompt=[(7 * row + place) % 120 for place in range(length)], seed=row, max_tokens=max_tokens, **params
        ): SELECTIONS[selection]
        for row, (length, max_tokens, selection, params) in enumerate(drawn)
    }


def run(world: World, asked: dict[Request, SelectionSlots | None]) -> list[Any]:
    slots = {request: chosen for request, chosen in asked.items() if chosen is not None}
    return list(world.run(list(asked), slots=slots).values())


PARAMS = st.sampled_from(
    [{"temperature": 0.0}, {"top_p": 0.8}, {}, {"temperature": 0.0, "logprobs": 3}, {"prompt_logprobs": 1}]
)
DRAWN = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(0, 3), PARAMS)


@settings(max_examples=25, deadline=None)
@given(drawn=st.lists(DRAWN, min_size=1, max_size=MAX_NUM_SEQS))
def test_every_batch_gives_the_bits_that_it_gives_op_by_op(
    model: DecoderModel, pools: LoRAPools, drawn: list[tuple[int, int, int, dict[str, Any]]]
) -> None:
    replaying, eager = worlds(model, pools)
    assert run(replaying, requests_of(drawn)) == run(eager, requests_of(drawn))
    assert eager.runner.num_replayed_steps == 0
    if max(max_tokens for _, max_tokens, _, _ in drawn) > 1:
        assert replaying.runner.num_replayed_steps > 0


def test_a_padded_row_changes_no_cache_and_no_neighbour(model: DecoderModel, pools: LoRAPools) -> None:
    replaying, eager = worlds(model, pools)
    asked = [(4, 6, 1, {"temperature": 0.0}), (2, 6, 0, {"temperature": 0.0}), (9, 6, 3, {"temperature": 0.0})]
    run(replaying, requests_of(asked))  # three rows run as four
    run(eager, requests_of(asked))
    assert replaying.free_blocks == eager.free_blocks
    for ours, theirs in zip(replaying.kv_caches, eager.kv_caches, strict=True):
        torch.testing.assert_close(ours.key, theirs.key, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.value, theirs.value, rtol=0, atol=0, equal_nan=True)


def test_a_batch_that_follows_a_wider_one_sees_nothing_of_it(model: DecoderModel, pools: LoRAPools) -> None:
    replaying, eager = worlds(model, pools)
    wide = [(5, 3, 3, {"temperature": 0.0})] * 6
    narrow = [(3, 4, 0, {"temperature": 0.0}), (6, 4, 2, {"temperature": 0.0})]
    for asked in (wide, narrow, wide[:1]):
        assert run(replaying, requests_of(asked)) == run(eager, requests_of(asked))


def test_a_row_that_is_not_finite_fails_alone(model: DecoderModel, pools: LoRAPools) -> None:
    poisoned = replace(pools, scaling=pools.scaling.clone())
    poisoned.scaling[1, Projection.DOWN, 3] = torch.nan
    world, healthy = (
        World.over(model, poisoned, make_graphs=lambda caches: create_graphs(model, poisoned, caches)),
        World.over(model, pools),
    )
    asked = [(1, 3, 0, {"temperature": 0.0}), (1, 3, 1, {"top_p": 0.9}), (1, 3, 2, {"temperature": 0.0})]
    answers, expected = run(world, requests_of(asked)), run(healthy, requests_of(asked))
    assert [answer.is_finite for answer in answers] == [True, False, True]
    assert answers[1].token_ids == []
    assert (answers[0], answers[2]) == (expected[0], expected[2])
    assert world.runner.num_eager_steps == 0


def test_prefills_and_prompt_logprobs_take_the_other_path_and_are_counted(
    model: DecoderModel, pools: LoRAPools
) -> None:
    replaying, _ = worlds(model, pools)
    run(replaying, requests_of([(4, 3, 0, {})]))
    assert (replaying.runner.num_eager_steps, replaying.runner.num_replayed_steps) == (1, 2)
    run(replaying, requests_of([(1, 1, 0, {"prompt_logprobs": 2})]))
    assert (replaying.runner.num_eager_steps, replaying.runner.num_replayed_steps) == (2, 2)


def test_prompts_in_pieces_of_one_token_are_replayed_too(model: DecoderModel, pools: LoRAPools) -> None:
    replaying, eager = worlds(model, pools)
    asked = [(4, 3, 1, {"temperature": 0.0}), (2, 3, 0, {"temperature": 0.0})]  # at first nobody is sampled
    answers = [
        list(world.run(list(requests), chunk_size=1, slots={r: s for r, s in requests.items() if s}).values())
        for world, requests in ((replaying, requests_of(asked)), (eager, requests_of(asked)))
    ]
    assert answers[0] == answers[1]
    assert replaying.runner.num_eager_steps == 0


def test_shapes_are_recorded_once_and_buffers_are_never_reallocated(model: DecoderModel, pools: LoRAPools) -> None:
    recorder = CountingRecorder()
    kept: list[DecodeGraphs] = []

    def make(kv_caches: list[KVCache]) -> DecodeGraphs:
        kept.append(create_graphs(model, pools, kv_caches, recorder))
        return kept[0]

    world = World.over(model, pools, make_graphs=make)
    graphs = kept[0]
    addresses = (graphs._memory.host.data_ptr(), graphs._memory.device.data_ptr(), graphs._logits.data_ptr())
    graphs.record_common(budget_s=1e9)
    num_common = recorder.num_recorded
    assert num_common == 2 * len(graphs.batch_sizes) == graphs.num_recorded
    asked = [(3, 4, selection, {"temperature": 0.0}) for selection in (0, 1, 3)]
    for _ in range(2):
        run(world, requests_of(asked))
        run(world, requests_of(asked[:1]))
    assert recorder.num_recorded == num_common == graphs.num_recorded, "the usual shapes were there before"
    assert recorder.num_replays == world.runner.num_replayed_steps > 0
    assert addresses == (graphs._memory.host.data_ptr(), graphs._memory.device.data_ptr(), graphs._logits.data_ptr())


def test_no_time_to_record_leaves_it_to_the_first_use(model: DecoderModel, pools: LoRAPools) -> None:
    graphs = create_graphs(model, pools, model.allocate_kv_caches(1, BLOCK_SIZE))
    graphs.record_common(budget_s=-1.0)
    assert graphs.num_recorded == 0


def test_the_ladders_end_at_what_may_run(model: DecoderModel, pools: LoRAPools) -> None:
    graphs = create_graphs(model, pools, model.allocate_kv_caches(1, BLOCK_SIZE))
    assert graphs.batch_sizes == (1, 2, 4, 6)
    assert graphs.largest == GraphShape(num_seqs=6, max_seq_len=2048, table_width=NUM_SLOTS)
    without = create_graphs(model, None, model.allocate_kv_caches(1, BLOCK_SIZE))
    assert without.largest.table_width == 0
    without.compute_largest()
