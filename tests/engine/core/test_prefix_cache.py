"""A prefix is shared exactly where the KV is the same: tokens, selection and tenant."""

from __future__ import annotations

import pytest

from loraplex.adapters.ref import BASE, LoraSelection, SelectionPart
from loraplex.engine.messages import UnloadAdapter
from tests.engine.core.world import World, make_request, ref, select, solo_tokens

L70 = list(range(70))
BLOCK_SIZE = 16


def long_world(**settings: int | bool) -> World:
    return World(block_size=BLOCK_SIZE, max_num_batched_tokens=256, **settings)  # type: ignore[arg-type]


def run_one(world: World, request_id: str, selection: LoraSelection = BASE, salt: bytes = b"") -> int:
    """Cached tokens of the 70-token prompt; its answer is checked against a cold run."""
    request = make_request(request_id, L70, selection=selection, salt=salt)
    world.add(request)
    world.run()
    assert world.tokens(request_id) == solo_tokens(request)
    return world.cached_tokens(request_id)


def test_base_and_each_adapter_cache_for_themselves() -> None:
    world = long_world()
    order = [("base", BASE), ("A", select("a")), ("B", select("b"))]
    first = [run_one(world, f"{name} 1", selection) for name, selection in order]
    second = [run_one(world, f"{name} 2", selection) for name, selection in order]

    assert (first, second) == ([0, 0, 0], [64, 64, 64])


def test_a_mix_with_other_weights_shares_nothing() -> None:
    world = long_world()
    mixes = [
        LoraSelection.of([SelectionPart(ref("a"), weight), SelectionPart(ref("b"), 1 - weight)])
        for weight in (0.5, 0.25)
    ]
    assert [run_one(world, f"m{index}", mix) for index, mix in enumerate(mixes)] == [0, 0]
    assert run_one(world, "again", mixes[0]) == 64


def test_two_tenants_share_nothing_even_on_the_base() -> None:
    world = long_world()
    assert run_one(world, "t1 first", salt=b"one") == 0
    assert run_one(world, "t2 first", salt=b"two") == 0
    assert run_one(world, "t1 again", salt=b"one") == 64


def test_a_new_version_of_an_adapter_starts_cold() -> None:
    world = long_world()
    run_one(world, "v1", select("sql v1"))
    assert run_one(world, "v2", select("sql v2")) == 0


def test_an_unloaded_adapter_leaves_no_cached_prefix() -> None:
    world = long_world()
    run_one(world, "base", BASE)
    run_one(world, "before", select("a"))
    cached_before = world.core.stats().num_blocks_cached
    world.handle(UnloadAdapter(1, ref("a").digest))
    world.run()

    assert world.replies[1].error is None
    assert world.core.stats().num_blocks_cached == cached_before / 2
    assert run_one(world, "after", select("a")) == 0
    assert run_one(world, "base again", BASE) == 64


@pytest.mark.parametrize("num_tokens", [16, 32, 64])
def test_a_fully_cached_prompt_still_computes_its_last_token(num_tokens: int) -> None:
    world = long_world()
    for request_id in ("cold", "warm"):
        world.add(make_request(request_id, num_tokens, max_tokens=2))
        world.run()

    assert world.cached_tokens("warm") == num_tokens - BLOCK_SIZE
    assert world.tokens("warm") == world.tokens("cold")


def test_a_request_with_prompt_logprobs_reads_no_cached_prefix() -> None:
    world = long_world()
    run_one(world, "warm up")
    request = make_request("scored", L70, prompt_logprobs=0)
    world.add(request)
    world.run()

    assert world.cached_tokens("scored") == 0
    prompt_logprobs = world.outputs["scored"][0].prompt_logprobs
    assert prompt_logprobs is not None
    assert len(prompt_logprobs) == 70


def test_output_tokens_are_cached_for_the_next_turn() -> None:
    world = long_world()
    world.add(make_request("turn 1", 20, max_tokens=30))
    world.run()
    history = make_request("", 20).prompt_token_ids + world.tokens("turn 1")
    world.add(make_request("turn 2", [*history, 3, 4]))
    world.run()

    assert world.cached_tokens("turn 2") == 48  # 49 tokens have KV: the last one sampled was never computed


def test_nothing_is_cached_when_caching_is_off() -> None:
    world = long_world(enable_prefix_caching=False)
    run_one(world, "first")
    assert run_one(world, "second") == 0
    assert world.core.stats().num_blocks_cached == 0


def test_the_least_recently_used_prefix_is_taken_first() -> None:
    world = World(num_blocks=8, block_size=4, max_model_len=32)
    for request_id, token in (("old", 1), ("young", 2)):
        world.add(make_request(request_id, [token] * 12, max_tokens=1))
        world.run()
    world.add(make_request("taker", [3] * 14, max_tokens=1))
    world.run()
    world.add(make_request("young again", [2] * 12, max_tokens=1))
    world.run()
    world.add(make_request("old again", [1] * 12, max_tokens=1))
    world.run()

    assert world.cached_tokens("young again") == 8
    assert world.cached_tokens("old again") < 8


class TestChoicesOfOneParent:
    def test_the_others_compute_only_what_the_first_has_not_cached(self) -> None:
        world = World(block_size=4, max_num_batched_tokens=16)
        for index in range(4):
            leader = "c0" if index else None
            world.add(make_request(f"c{index}", 30, seed=index, leader=leader))
        world.run()

        computed = {
            f"c{index}": sum(step.get(f"c{index}", 0) for step in world.runner.num_tokens) for index in range(4)
        }
        assert computed == {"c0": 30 + 3, "c1": 2 + 3, "c2": 2 + 3, "c3": 2 + 3}
        for index in range(4):
            assert world.tokens(f"c{index}") == solo_tokens(make_request("", 30, seed=index))

    def test_cached_tokens_count_only_what_was_cached_before_the_request(self) -> None:
        world = World(block_size=4)
        world.add(make_request("warm up", 8))
        world.run()
        world.add(*(make_request(f"c{index}", 30, leader="c0" if index else None) for index in range(3)))
        world.run()

        assert [world.cached_tokens(f"c{index}") for index in range(3)] == [8, 8, 8]
        assert world.core.stats().total_prompt_tokens == 8 + 30

    @pytest.mark.parametrize("steps", [0, 1])
    def test_they_start_when_the_first_has_gone(self, steps: int) -> None:
        world = World(block_size=4, max_num_batched_tokens=8)
        world.add(make_request("c0", 30), make_request("c1", 30, leader="c0"))
        world.step(steps)
        world.core.abort(["c0"])
        world.run()

        assert world.tokens("c1") == solo_tokens(make_request("", 30))
        world.assert_nothing_left()

    def test_one_that_waits_for_its_leader_can_be_aborted(self) -> None:
        world = World(block_size=4, max_num_batched_tokens=8)
        world.add(make_request("c0", 30), make_request("c1", 30, leader="c0"))
        world.step()
        world.core.abort(["c1"])
        world.run()

        assert world.finish_reasons("c1") == ["abort"]
        assert world.tokens("c0") == solo_tokens(make_request("", 30))
        world.assert_nothing_left()

    def test_a_request_that_names_itself_does_not_wait(self) -> None:
        world = World()
        world.add(make_request("c0", 30, leader="c0"))
        world.run()
        assert world.finish_reasons("c0") == ["length"]
