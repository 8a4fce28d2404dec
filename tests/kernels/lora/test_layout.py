"""The layout of a step: each token with a selection lies in exactly one chunk, and nobody else in any."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAMeta, SelectionSlots, SlotTable
from tests.kernels.lora.helpers import selection_of

CPU = torch.device("cpu")


def build(token_selection: list[int], selections: list[SelectionSlots], chunk_size: int = 4) -> LoRAMeta:
    meta = build_lora_meta(np.array(token_selection, dtype=np.int32), selections, device=CPU, chunk_size=chunk_size)
    assert meta is not None
    return meta


def chunks_of(meta: LoRAMeta) -> list[tuple[int, list[int]]]:
    order = meta.token_order.tolist()
    return [
        (selection, order[start : start + length])
        for selection, start, length in zip(
            meta.chunk_selection.tolist(), meta.chunk_start.tolist(), meta.chunk_len.tolist(), strict=True
        )
    ]


def test_a_worked_example() -> None:
    meta = build([1, -1, 0, 1, 1, 1, 1], [selection_of([5]), selection_of([2, 7], weights=[0.5, 2.0])])
    assert chunks_of(meta) == [(1, [0, 3, 4, 5]), (1, [6]), (0, [2])]
    assert meta.attention.slot_table.tolist() == [[5, -1], [2, 7]]
    assert meta.attention.slot_weight.tolist() == [[1.0, 0.0], [0.5, 2.0]]
    assert meta.token_selection.tolist() == [1, -1, 0, 1, 1, 1, 1]


def test_there_is_no_layout_when_no_token_has_a_selection() -> None:
    for tokens in ([], [-1, -1]):
        array = np.array(tokens, dtype=np.int32)
        assert build_lora_meta(array, [selection_of([1])], device=CPU, chunk_size=4) is None


def test_a_selection_without_slots_in_a_space_is_in_no_group_of_it() -> None:
    attention_only = SelectionSlots(selection_of([3]).attention, ())
    meta = build([0, 0, 0], [attention_only])
    assert meta.mlp.slot_table.shape == (1, 0)
    assert list(meta.mlp.groups) == []
    assert len(list(meta.attention.groups)) == 1


def test_a_crowd_of_one_selection_names_its_slots_once() -> None:
    meta = build([0] * 40 + [1, 2], [selection_of([4, 5]), selection_of([6, 7]), selection_of([8, 9])])
    slots = sorted(group.slots.tolist() for group in meta.attention.groups)
    assert slots == [[[4, 5]], [[6, 7], [8, 9]]]


@settings(max_examples=50, deadline=None)
@given(
    token_selection=st.lists(st.integers(-1, 4), min_size=1, max_size=60),
    widths=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunk_size=st.integers(1, 9),
)
def test_every_token_with_a_selection_is_in_exactly_one_chunk(
    token_selection: list[int], widths: list[int], chunk_size: int
) -> None:
    array = np.array(token_selection, dtype=np.int32)
    selections = [selection_of(range(10 * i, 10 * i + width)) for i, width in enumerate(widths)]
    meta = build_lora_meta(array, selections, device=CPU, chunk_size=chunk_size)
    with_selection = [token for token, selection in enumerate(token_selection) if selection >= 0]
    if meta is None:
        assert not with_selection
        return
    chunks = chunks_of(meta)
    assert sorted(token for _, tokens in chunks for token in tokens) == with_selection
    assert all(token_selection[token] == selection for selection, tokens in chunks for token in tokens)
    assert all(1 <= len(tokens) <= chunk_size for _, tokens in chunks)
    assert_groups_cover(meta.attention, token_selection, widths, chunk_size)


def assert_groups_cover(space: SlotTable, token_selection: list[int], widths: list[int], chunk_size: int) -> None:
    covered = []
    for group in space.groups:
        assert group.num_chunks >= 2
        assert group.rows.shape == (group.num_chunks * chunk_size,)
        assert torch.equal(group.rows[group.kept], group.tokens)
        slots = group.slots.expand(group.num_chunks, -1)
        for place, token in zip(group.kept.tolist(), group.tokens.tolist(), strict=True):
            first = 10 * token_selection[token]
            assert slots[place // chunk_size].tolist() == list(range(first, first + widths[token_selection[token]]))
        covered += group.tokens.tolist()
    assert sorted(covered) == [t for t, s in enumerate(token_selection) if s >= 0 and widths[s] > 0]


def test_what_a_group_gathers_is_bounded() -> None:
    """64 selections of rank 256 in one product would copy as much again as all their A and B."""
    selections = [selection_of(range(32 * i, 32 * i + 32)) for i in range(64)]
    meta = build(list(range(64)), selections)
    assert max(group.slots.numel() for group in meta.attention.groups) <= 64
    assert sorted(token for group in meta.attention.groups for token in group.tokens.tolist()) == list(range(64))
