from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.runner.input_batch import build_input_batch
from loraplex.engine.scheduler_output import ScheduledRequest
from loraplex.kernels.lora.metadata import SelectionSlots, WeightedSlot
from tests.engine.runner.helpers import create_request

CPU = torch.device("cpu")
SLOTS = [
    None,
    SelectionSlots((WeightedSlot(3, 1.0),), ()),
    SelectionSlots((WeightedSlot(3, 0.5), WeightedSlot(1, -1.0)), (WeightedSlot(0, 0.5),)),
    SelectionSlots((WeightedSlot(3, 0.25), WeightedSlot(1, -1.0)), (WeightedSlot(0, 0.5),)),
]


@st.composite
def scheduled_requests(draw: st.DrawFn) -> list[ScheduledRequest]:
    """Chunks at any place of prompts and outputs, over scattered blocks of 4 tokens, one-token chunks first."""
    free_blocks = draw(st.permutations(range(60)))
    entries = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=12))
        output = draw(st.lists(st.integers(0, 99), max_size=6))
        request = create_request(
            prompt=prompt,
            output=output,
            max_tokens=draw(st.integers(0, 8)),
            prompt_logprobs=draw(st.none() | st.just(1)),
        )
        request.num_computed_tokens = draw(st.integers(0, request.num_tokens - 1))
        num_tokens = draw(st.integers(1, request.num_tokens_to_compute))
        request.block_ids = [free_blocks.pop() for _ in range(-(-request.num_tokens // 4) + draw(st.integers(0, 1)))]
        entries.append(ScheduledRequest(request=request, num_tokens=num_tokens, slots=draw(st.sampled_from(SLOTS))))
    return sorted(entries, key=lambda entry: entry.num_tokens > 1)


@settings(max_examples=200, deadline=None)
@given(scheduled=scheduled_requests())
def test_batch_equals_a_walk_over_all_tokens(scheduled: list[ScheduledRequest]) -> None:
    batch = build_input_batch(scheduled, block_size=4, lora_chunk_size=2, device=CPU)
    token = 0
    sampled, sampled_rows, prompt = [], [], []
    for sequence, entry in enumerate(scheduled):
        request = entry.request
        assert batch.query_start[sequence] == token
        for position in range(request.num_computed_tokens, request.num_computed_tokens + entry.num_tokens):
            assert batch.input_ids[token] == request.token_ids[position]
            assert batch.positions[token] == position
            assert batch.attention.slot_mapping[token] == request.block_ids[position // 4] * 4 + position % 4
            if request.wants_prompt_logprobs and not request.output_token_ids and position + 1 < len(request.token_ids):
                prompt.append((token, request.prompt_token_ids[position + 1], sequence))
            token += 1
        if (
            request.num_computed_tokens + entry.num_tokens == len(request.token_ids)
            and len(request.output_token_ids) < request.max_tokens
        ):
            sampled.append(sequence)
            sampled_rows.append(token - 1)
    assert batch.query_start[-1] == token == len(batch.input_ids) == len(batch.positions)
    assert batch.sampled.tolist() == sampled
    assert batch.sampled_rows.tolist() == sampled_rows
    rows = zip(batch.prompt.rows, batch.prompt.token_ids, batch.prompt.sequences, strict=True)
    assert [tuple(map(int, row)) for row in rows] == prompt


@settings(max_examples=100, deadline=None)
@given(scheduled=scheduled_requests())
def test_every_token_finds_the_slots_of_its_request(scheduled: list[ScheduledRequest]) -> None:
    lora = build_input_batch(scheduled, block_size=4, lora_chunk_size=2, device=CPU).lora
    expected = [entry.slots for entry in scheduled for _ in range(entry.num_tokens)]
    if lora is None:
        assert not any(expected)
        return
    distinct = {entry.slots for entry in scheduled if entry.slots is not None}
    assert lora.attention.slot_table.shape[0] == len(distinct)
    for selection, slots in zip(lora.token_selection.tolist(), expected, strict=True):
        assert (selection == -1) == (slots is None)
        if slots is not None:
            for table, space in ((lora.attention, slots.attention), (lora.mlp, slots.mlp)):
                ids, weights = table.slot_table[selection].tolist(), table.slot_weight[selection].tolist()
                assert list(zip(ids, weights, strict=True))[: len(space)] == [tuple(slot) for slot in space]
                assert all(slot == -1 for slot in ids[len(space) :])


def test_sequence_lengths_and_decodes() -> None:
    decode = create_request(prompt=[1, 2, 3], output=[4])
    decode.num_computed_tokens, decode.block_ids = 3, [7]
    chunk = create_request(prompt=range(9))
    chunk.num_computed_tokens, chunk.block_ids = 4, [2, 5, 1]
    batch = build_input_batch(
        [
            ScheduledRequest(request=decode, num_tokens=1, slots=None),
            ScheduledRequest(request=chunk, num_tokens=3, slots=None),
        ],
        block_size=4,
        lora_chunk_size=16,
        device=CPU,
    )
    assert batch.attention.seq_lens.tolist() == [4, 7]
    assert batch.attention.query_start_loc.tolist() == [0, 1, 4]
    assert batch.attention.num_decodes == 1
    assert batch.attention.slot_mapping.tolist() == [31, 20, 21, 22]
    assert batch.lora is None
    assert batch.sampled.tolist() == [0]
