"""Preemption by recompute: the earliest admitted always finishes, and nobody's answer changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.ref import BASE
from loraplex.engine.request import Request, RequestStatus
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import World, make_request, select, solo_tokens

BLOCK_SIZE = 4
LONGEST = 40  # tokens of prompt and output together


@given(
    lengths=st.lists(st.tuples(st.integers(0, 27), st.integers(1, 12), st.integers(0, 10)), min_size=2, max_size=12),
    tenants=st.integers(1, 3),
    max_num_batched_tokens=st.integers(6, 32),
    enable_prefix_caching=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_the_earliest_admitted_always_finishes_with_blocks_for_little_more_than_one_prompt(
    lengths: list[tuple[int, int, int]], tenants: int, max_num_batched_tokens: int, enable_prefix_caching: bool
) -> None:
    world = World(
        num_blocks=int(1.2 * LONGEST / BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=6,
        max_model_len=LONGEST,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = [
        make_request(f"r{i}", [i, *range(prompt)], max_tokens=output, salt=bytes([i % tenants]))
        for i, (prompt, output, _) in enumerate(lengths)
    ]
    admitted: list[Request] = []
    for request, (_, _, steps) in zip(requests, lengths, strict=True):
        world.add(request)
        for _ in range(steps):
            step_and_check_earliest(world, admitted)
    while world.core.has_work:
        step_and_check_earliest(world, admitted)

    for request in requests:
        assert world.tokens(request.request_id) == solo_tokens(request)
    world.assert_nothing_left()


def step_and_check_earliest(world: World, admitted: list[Request]) -> None:
    """One step, in which the first of `admitted` computes something; `admitted` is brought up to date."""
    num_steps = len(world.runner.steps)
    world.step()
    scheduled = [entry.request for output in world.runner.steps[num_steps:] for entry in output.scheduled]
    if admitted:
        assert admitted[0] in scheduled
    new = [request for request in scheduled if request not in admitted]
    admitted += sorted(new, key=lambda request: request.arrival_index)
    admitted[:] = [request for request in admitted if request.status is RequestStatus.RUNNING]


def test_the_youngest_is_preempted_and_goes_back_ahead_of_later_arrivals() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32, enable_prefix_caching=False)
    requests = [make_request(f"r{i}", [i, *range(9)], max_tokens=12) for i in range(4)]
    world.add(*requests)
    world.run()

    assert list(world.outputs) == ["r0", "r1", "r2", "r3"]
    first = {f"r{i}": next(n for n, step in enumerate(world.runner.num_tokens) if f"r{i}" in step) for i in range(4)}
    last = {f"r{i}": max(n for n, step in enumerate(world.runner.num_tokens) if f"r{i}" in step) for i in range(4)}
    assert last["r0"] - first["r0"] == 11  # never interrupted
    assert last["r1"] < last["r2"] < last["r3"]
    assert world.core.stats().total_preemptions > 0
    for request in requests:
        assert world.tokens(request.request_id) == solo_tokens(request)


def test_of_several_who_were_admitted_later_the_youngest_is_the_victim() -> None:
    world = World(num_blocks=7, block_size=4, max_model_len=28, enable_prefix_caching=False)
    world.add(make_request("old", [1] * 8, max_tokens=12), make_request("middle", [2] * 6, max_tokens=3))
    world.add(make_request("young", [3] * 10, max_tokens=12))
    world.step(2)  # `old` crosses into its third block, and all seven are taken

    assert world.core.stats().total_preemptions == 1
    assert set(world.runner.num_tokens[-1]) == {"old", "middle"}
    world.run()
    assert world.tokens("young") == solo_tokens(make_request("", [3] * 10, max_tokens=12))


def test_a_waiting_request_preempts_nobody() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32)
    world.add(make_request("old", [1] * 25, max_tokens=7))
    world.step()
    world.add(make_request("new", [2] * 20, max_tokens=2))
    world.step(5)
    assert world.core.stats().total_preemptions == 0
    assert "new" not in world.outputs
    world.run()
    assert world.tokens("new") == solo_tokens(make_request("", [2] * 20, max_tokens=2))


def test_preemption_gives_back_the_lease_and_the_request_acquires_again() -> None:
    world = World(
        num_blocks=8, block_size=4, max_model_len=32, adapters=FakeAdapters(num_slots=2), enable_prefix_caching=False
    )
    requests = [
        make_request("r0", [1, *range(10)], max_tokens=12),
        make_request("r1", [2, *range(10)], max_tokens=12, selection=select("a")),
    ]
    world.add(*requests)
    leases_after_preemption = None
    while world.core.has_work:
        world.step()
        if world.core.stats().total_preemptions and leases_after_preemption is None:
            leases_after_preemption = world.core.integrity().num_leases

    assert leases_after_preemption == 0
    for request in requests:
        assert world.tokens(request.request_id) == solo_tokens(request)


def test_prompt_logprobs_are_kept_across_preemption_and_delivered_once() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=4, max_num_batched_tokens=4)
    scored = make_request("scored", [3, *range(23)], max_tokens=4, prompt_logprobs=0)
    world.add(make_request("old", 3, max_tokens=14))
    world.step()
    world.add(scored)
    world.run()

    chunks = [step["scored"] for step in world.runner.num_tokens if "scored" in step]
    assert sum(chunks) > 24 + 3  # it was preempted in the middle of its prompt, and some of it came twice
    delivered = [output.prompt_logprobs for output in world.outputs["scored"] if output.prompt_logprobs is not None]
    quiet = World()
    quiet.add(scored)
    quiet.run()
    assert delivered == [quiet.outputs["scored"][0].prompt_logprobs]
    assert [entry.token_id for entry in delivered[0] if entry] == scored.prompt_token_ids[1:]


def test_a_request_preempted_after_its_prompt_logprobs_does_not_deliver_them_again() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=8)
    world.add(make_request("old", 10, max_tokens=14), make_request("scored", 14, max_tokens=8, prompt_logprobs=0))
    world.run()

    assert world.core.stats().total_preemptions > 0
    assert [output.prompt_logprobs is not None for output in world.outputs["scored"]] == [True, *[False] * 7]


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32)
    world.add(make_request("old", [1, *range(10)], max_tokens=14), make_request("new", [2, *range(10)], max_tokens=10))
    world.run()

    assert world.core.stats().total_preemptions > 0
    assert {output.num_cached_tokens for output in world.outputs["new"]} == {0}


def test_the_base_and_an_adapter_preempt_each_other_without_loss() -> None:
    world = World(num_blocks=10, block_size=4, max_model_len=40, adapters=FakeAdapters(num_slots=1, load_steps=3))
    requests = [
        make_request(f"r{i}", [i, *range(8)], max_tokens=16, selection=selection)
        for i, selection in enumerate([BASE, select("a"), select("b"), BASE, select("a")])
    ]
    world.add(*requests)
    world.run()
    for request in requests:
        assert world.tokens(request.request_id) == solo_tokens(request)
    world.assert_nothing_left()
