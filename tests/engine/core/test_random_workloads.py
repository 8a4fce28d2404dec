"""Whatever arrives in whatever order: everybody ends once, with the answer of a solo run, and nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.ref import BASE, LoraSelection
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.outputs import FinishReason
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import World, make_request, ref, select, solo_tokens

SELECTIONS = [
    BASE,
    select("a"),
    select("b"),
    select("c"),
    select("a", "b"),
    LoraSelection.single(ref("big", attention=2)),
]
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Arrival:
    step: int
    request: GenerateRequest
    abort_after: int | None = field(default=None)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to ten requests; prompts share prefixes on purpose, some are aborted some steps after their arrival."""
    drawn = []
    for index in range(draw(st.integers(1, 10))):
        shared = draw(st.integers(0, 12))
        own = draw(st.lists(st.integers(1, 3), max_size=12))
        request = make_request(
            f"r{index}",
            [7] * shared + own or [7],
            max_tokens=draw(st.integers(0, 12)),
            selection=draw(st.sampled_from(SELECTIONS)),
            salt=draw(st.sampled_from([b"", b"tenant"])),
            leader=draw(st.sampled_from([None, "r0"])),
            seed=draw(st.integers(0, 2)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=tuple(draw(st.sets(st.integers(0, 96), max_size=6))),
            prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
        )
        abort_after = draw(st.none() | st.integers(0, 20)) if draw(st.booleans()) else None
        drawn.append(Arrival(draw(st.integers(0, 25)), request, abort_after))
    return drawn


@given(
    plan=arrivals(),
    num_blocks=st.integers(10, 16),
    max_num_seqs=st.integers(1, 5),
    extra_tokens=st.integers(0, 20),
    enable_prefix_caching=st.booleans(),
    num_slots=st.integers(2, 4),
    load_steps=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_everyone_ends_once_with_the_tokens_of_a_solo_run(
    plan: list[Arrival],
    num_blocks: int,
    max_num_seqs: int,
    extra_tokens: int,
    enable_prefix_caching: bool,
    num_slots: int,
    load_steps: int,
) -> None:
    world = World(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_tokens,
        max_model_len=num_blocks * BLOCK_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        adapters=FakeAdapters(num_slots=num_slots, load_steps=load_steps),
    )
    for step in range(50):
        for arrival in plan:
            if arrival.step == step:
                world.add(arrival.request)
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                world.core.abort([arrival.request.request_id])
        world.step()
    world.run()

    for arrival in plan:
        request = arrival.request
        reasons, expected = world.finish_reasons(request.request_id), solo_tokens(request)
        assert len(reasons) == 1
        assert world.last(request.request_id).finish_reason is reasons[0]
        if reasons[0] is FinishReason.ABORT:
            assert arrival.abort_after is not None
            assert world.tokens(request.request_id) == expected[: len(world.tokens(request.request_id))]
        else:
            assert reasons[0] in (FinishReason.STOP, FinishReason.LENGTH)
            assert world.tokens(request.request_id) == expected
    world.assert_nothing_left()
