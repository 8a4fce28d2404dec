"""Whatever arrives in whatever order: everybody ends once, with the answer of a solo run, and nothing is left."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.ref import BASE, LoraSelection
from loraplex.engine.messages import (
    EngineCall,
    GenerateRequest,
    LoadAdapter,
    PinAdapter,
    UnloadAdapter,
    UnpinAdapter,
)
from loraplex.engine.outputs import FinishReason
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import World, make_request, ref, select, solo_tokens

BIG = ref("big", attention=2)
SELECTIONS = [BASE, select("a"), select("b"), select("c"), select("a", "b"), LoraSelection.single(BIG)]
REFS = [ref("a"), ref("b"), ref("c"), ref("new")]
BLOCK_SIZE = 4
LAST_ARRIVAL = 30


@dataclass(frozen=True)
class Arrival:
    step: int
    request: GenerateRequest
    abort_at: int | None
    non_finite_after: int | None  # output tokens


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to ten requests whose prompts share prefixes; some are aborted, some meet NaN."""
    return [draw(arrival(f"r{index}")) for index in range(draw(st.integers(1, 10)))]


@st.composite
def arrival(draw: st.DrawFn, request_id: str) -> Arrival:
    prompt = [7] * draw(st.integers(0, 12)) + draw(st.lists(st.integers(1, 3), max_size=12))
    request = make_request(
        request_id,
        prompt or [7],
        max_tokens=draw(st.integers(0, 12)),
        selection=draw(st.sampled_from(SELECTIONS)),
        salt=draw(st.sampled_from([b"", b"tenant"])),
        leader=draw(st.sampled_from([None, "r0"])),
        seed=draw(st.integers(0, 2)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.sets(st.integers(0, 96), max_size=6))),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 0])),
    )
    step = draw(st.integers(0, LAST_ARRIVAL))
    abort_at = step + draw(st.integers(0, 20)) if draw(st.integers(0, 3)) == 0 else None
    non_finite_after = draw(st.integers(0, 6)) if draw(st.integers(0, 5)) == 0 else None
    return Arrival(step, request, abort_at, non_finite_after)


@st.composite
def control_calls(draw: st.DrawFn) -> list[tuple[int, EngineCall]]:
    calls: list[tuple[int, EngineCall]] = []
    for call_id in range(draw(st.integers(0, 6))):
        adapter = draw(st.sampled_from(REFS))
        kinds: list[EngineCall] = [
            LoadAdapter(call_id, adapter),
            UnloadAdapter(call_id, adapter.digest),
            PinAdapter(call_id, adapter),
            UnpinAdapter(call_id, adapter.digest),
        ]
        call = draw(st.sampled_from(kinds))
        calls.append((draw(st.integers(0, LAST_ARRIVAL)), call))
    return calls


@given(
    plan=arrivals(),
    calls=control_calls(),
    broken=st.sampled_from([set(), {"c"}, {"new"}]),
    num_blocks=st.integers(10, 16),
    seats_and_tokens=st.tuples(st.integers(1, 5), st.integers(1, 25)),
    enable_prefix_caching=st.booleans(),
    num_slots=st.integers(2, 4),
    load_steps=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_everyone_ends_once_with_the_tokens_of_a_solo_run(
    plan: list[Arrival],
    calls: list[tuple[int, EngineCall]],
    broken: set[str],
    num_blocks: int,
    seats_and_tokens: tuple[int, int],
    enable_prefix_caching: bool,
    num_slots: int,
    load_steps: int,
) -> None:
    max_num_seqs, max_num_batched_tokens = seats_and_tokens
    world = World(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=num_blocks * BLOCK_SIZE,
        enable_prefix_caching=enable_prefix_caching,
        adapters=FakeAdapters(num_slots=num_slots, load_steps=load_steps, broken={ref(name).digest for name in broken}),
    )
    world.runner.non_finite = {
        arrival.request.request_id: arrival.non_finite_after for arrival in plan if arrival.non_finite_after is not None
    }
    for step in range(LAST_ARRIVAL + 25):
        world.add(*(arrival.request for arrival in plan if arrival.step == step))
        world.core.abort([arrival.request.request_id for arrival in plan if arrival.abort_at == step])
        for at, call in calls:
            if at == step:
                world.handle(call)
        world.step()
    world.run()

    for arrival in plan:
        check_end(world, arrival, broken={ref(name).digest for name in broken}, has_pins=bool(calls))
    assert len(world.replies) == len(calls)
    world.assert_nothing_left()


def check_end(world: World, arrival: Arrival, *, broken: set[str], has_pins: bool) -> None:
    """It ended in one way, for a reason that it had, with the tokens of a solo run up to there."""
    request = arrival.request
    tokens, expected = world.tokens(request.request_id), solo_tokens(request)
    (reason,) = world.finish_reasons(request.request_id)
    assert world.last(request.request_id).finish_reason is reason
    match reason:
        case FinishReason.ABORT:
            assert arrival.abort_at is not None
            assert tokens == expected[: len(tokens)]
        case FinishReason.ERROR:
            error = world.last(request.request_id).error
            assert error is not None
            assert tokens == expected[: len(tokens)]
            assert {
                "adapter_load_failed": bool(broken & {ref.digest for ref in request.selection.refs}),
                "adapter_never_fits": has_pins,
                "non_finite_logits": arrival.non_finite_after == len(tokens),
            }[error.code]
        case _:
            assert tokens == expected
            assert arrival.non_finite_after is None or arrival.non_finite_after >= len(expected)
