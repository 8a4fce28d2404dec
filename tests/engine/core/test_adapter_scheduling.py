"""Who gets the slots: bounded waits, nobody holds and waits, a bad or slow adapter concerns only its own requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.ref import BASE, LoraSelection
from loraplex.engine.core.admission_policy import MAX_OVERTAKEN_STEPS
from loraplex.engine.messages import LoadAdapter, PinAdapter
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import World, make_request, ref, select, solo_tokens

LOAD_STEPS = 2


def one_slot_world(**settings: int) -> World:
    return World(adapters=FakeAdapters(num_slots=1, load_steps=LOAD_STEPS), **settings)  # type: ignore[arg-type]


class TestStarvation:
    def test_one_request_for_b_starts_in_bounded_steps_however_many_for_a_arrive(self) -> None:
        world = one_slot_world()
        run = 8 + 1  # steps from admission to the end
        for step in range(200):
            if step % 4 == 0:
                world.add(make_request(f"a{step}", [step % 90, 1], max_tokens=8, selection=select("a")))
            if step == 10:
                world.add(make_request("b", selection=select("b")))
            world.step()
            if "b" in world.outputs:
                break

        assert world.num_steps - 10 <= MAX_OVERTAKEN_STEPS + run + LOAD_STEPS + 1

    def test_those_who_need_no_new_slot_pass_for_a_while(self) -> None:
        world = one_slot_world()
        world.add(make_request("a1", max_tokens=12, selection=select("a")))
        world.step(4)
        world.add(make_request("b", selection=select("b")), make_request("a2", selection=select("a")))
        world.add(make_request("base"), make_request("c", selection=select("c")))
        world.step(2)

        assert {"a2", "base"} <= set(world.outputs)
        assert not {"b", "c"} & set(world.outputs)
        assert world.adapters.loads == [ref("a").digest]

    def test_when_the_engine_drains_only_the_base_goes_on(self) -> None:
        world = one_slot_world()
        world.add(make_request("a1", max_tokens=60, selection=select("a")))
        world.step(4)
        world.add(make_request("b", selection=select("b")))
        world.step(MAX_OVERTAKEN_STEPS + 1)
        world.add(make_request("a2", selection=select("a")), make_request("base"))
        world.step(8)
        assert "base" in world.outputs
        assert "a2" not in world.outputs

        world.run()
        order = list(world.outputs)
        assert order.index("b") < order.index("a2")
        world.assert_nothing_left()

    def test_nobody_loads_into_the_slot_that_a_mix_ahead_of_it_waits_for(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=LOAD_STEPS))
        world.add(make_request("a", max_tokens=12, selection=select("a")))
        world.step(4)
        mix = make_request("mix", selection=select("x", "y"))
        world.add(mix, make_request("c", selection=select("c")))
        world.step(4)
        assert world.adapters.loads == [ref("a").digest]

        world.run()
        assert list(world.outputs) == ["a", "mix", "c"]
        assert world.tokens("mix") == solo_tokens(mix)

    def test_a_long_prompt_is_not_overtaken_for_ever_by_short_ones(self) -> None:
        world = World(num_blocks=10, block_size=4, max_model_len=40)
        world.add(make_request("short", 3, max_tokens=6))
        world.step()
        long = make_request("long", 36)
        world.add(long)
        for step in range(60):
            world.add(make_request(f"s{step}", 3, max_tokens=6))
            world.step()
        assert world.tokens("long") == solo_tokens(long)
        assert world.core.stats().num_waiting > 0

    @given(
        arrivals=st.lists(
            st.tuples(
                st.integers(0, 3),
                st.sampled_from(["a", "b", "c", "ab", ""]),
                st.sampled_from([1, 5, 9]),
                st.integers(1, 4),
            ),
            min_size=1,
            max_size=60,
        ),
        num_slots=st.integers(2, 3),
        num_blocks=st.integers(3, 10),
    )
    @settings(max_examples=100, deadline=None)
    def test_whoever_comes_to_the_front_is_served_within_the_stated_bound(
        self, arrivals: list[tuple[int, str, int, int]], num_slots: int, num_blocks: int
    ) -> None:
        """Outputs end inside the prompt's last block, so nobody is preempted; a run is a prefill and four tokens."""
        world = World(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=4,
            adapters=FakeAdapters(num_slots=num_slots, load_steps=LOAD_STEPS),
        )
        order: list[str] = []
        at_front_since: dict[str, int] = {}

        def step() -> None:
            front = next((request_id for request_id in order if request_id not in world.outputs), None)
            if front is not None:
                since = at_front_since.setdefault(front, world.num_steps)
                assert world.num_steps - since <= MAX_OVERTAKEN_STEPS + 3 * 4 + LOAD_STEPS + 1
            world.step()

        for steps_before, adapters, prompt, max_tokens in arrivals:
            for _ in range(steps_before):
                step()
            order.append(f"r{len(order)}")
            world.add(make_request(order[-1], prompt, max_tokens=max_tokens, selection=select(*adapters)))
        while world.core.has_work:
            step()
        assert world.core.stats().total_preemptions == 0
        world.assert_nothing_left()


class TestCapacity:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def test_as_many_adapters_as_slots_and_the_base_at_once(self, data: st.DataObject) -> None:
        """A small pool, chunked prefill, three in ten cancelled; integrity is checked after every step."""
        world = World(num_blocks=12, max_num_batched_tokens=10, max_model_len=48)
        requests = [
            make_request(f"r{index}", [index, *range(11)], max_tokens=9, selection=selection)
            for index, selection in enumerate([select("a"), select("b"), select("c"), select("d"), BASE] * 2)
        ]
        world.add(*requests)
        aborted = set(data.draw(st.permutations(range(10)))[:3])
        for index in aborted:
            world.step(data.draw(st.integers(0, 12)))
            world.core.abort([f"r{index}"])
        world.run()

        for index, request in enumerate(requests):
            if index not in aborted:
                assert world.tokens(f"r{index}") == solo_tokens(request)
        world.assert_nothing_left()

    def test_a_request_refused_for_blocks_takes_no_adapters_place(self) -> None:
        world = World(
            num_blocks=10, block_size=4, max_model_len=40, adapters=FakeAdapters(num_slots=1, load_steps=LOAD_STEPS)
        )
        world.add(make_request("c1", selection=select("c"), max_tokens=1))
        world.run()
        world.add(make_request("base", 16, max_tokens=12))
        world.step()
        world.add(make_request("b", 32, selection=select("b")), make_request("c2", 4, selection=select("c")))
        world.step(4)

        assert world.tokens("c2") == solo_tokens(make_request("", 4, selection=select("c")))
        assert world.adapters.loads == [ref("c").digest]
        world.run()
        assert world.finish_reasons("b") == ["length"]

    def test_a_cold_adapter_may_load_while_the_one_before_it_lacks_blocks(self) -> None:
        world = World(
            num_blocks=10, block_size=4, max_model_len=40, adapters=FakeAdapters(num_slots=1, load_steps=LOAD_STEPS)
        )
        world.add(make_request("base", 16, max_tokens=12))
        world.step()
        world.add(make_request("b", 32, selection=select("b")), make_request("c", 4, selection=select("c")))

        assert world.run_until_started("c") <= LOAD_STEPS + 1
        assert "b" not in world.outputs
        world.run()
        world.assert_nothing_left()

    def test_whoever_lacks_blocks_when_its_adapter_is_there_gives_the_slot_away(self) -> None:
        world = World(num_blocks=10, block_size=4, max_model_len=40, adapters=FakeAdapters(num_slots=1, load_steps=3))
        late = make_request("late", [1] * 24, selection=select("b"))
        world.add(late)
        world.step()
        assert world.core.stats().num_waiting_for_adapter == 1
        world.add(make_request("base", [2] * 20, max_tokens=16), make_request("c", [3] * 3, selection=select("c")))

        world.run_until_started("c")  # while `base` has the blocks that `late` needs
        assert "late" not in world.outputs
        assert world.finish_reasons("base") == []
        world.run()
        assert world.tokens("late") == solo_tokens(late)

    def test_a_holder_without_blocks_gives_way_to_a_request_ahead_of_it(self) -> None:
        world = World(num_blocks=10, block_size=4, max_model_len=40, adapters=FakeAdapters(num_slots=1, load_steps=1))
        world.adapters.stuck = {ref("b").digest}
        world.add(make_request("base", 16, max_tokens=8))
        world.step()
        world.add(make_request("big", 32, selection=select("a")), make_request("b", selection=select("b")))
        world.step(2)
        assert world.core.stats().num_waiting_for_adapter == 1
        assert world.adapters.loads == [ref("b").digest]

        world.run_until_started("big")  # its blocks come free while `b` holds the only slot
        assert world.tokens("b") == []
        world.adapters.stuck.clear()
        world.run()
        assert world.tokens("b") == solo_tokens(make_request("", selection=select("b")))
        world.assert_nothing_left()

    def test_all_slots_pinned_or_leased_lets_requests_wait_and_refuses_calls(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=LOAD_STEPS))
        world.handle(PinAdapter(1, ref("pinned")))
        world.add(make_request("a", max_tokens=30, selection=select("a")))
        world.step(6)
        world.add(make_request("b", selection=select("b")))
        world.handle(LoadAdapter(2, ref("c")))
        world.handle(PinAdapter(3, ref("d")))
        world.step(4)

        error = world.replies[2].error
        assert error is not None
        assert error.code == "no_free_slots"
        assert "1 are in use and 1 pinned" in error.message
        assert world.replies[3].error is not None
        assert world.core.stats().num_waiting == 1
        world.run()
        assert world.tokens("b") == solo_tokens(make_request("", selection=select("b")))

    def test_a_selection_larger_than_the_unpinned_slots_is_refused_with_both_numbers(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2))
        world.add(make_request("huge", selection=LoraSelection.single(ref("huge", mlp=3))))
        world.run()

        error = world.last("huge").error
        assert error is not None
        assert error.code == "adapter_never_fits"
        assert "3" in error.message
        assert "2" in error.message
        world.assert_nothing_left()

    def test_a_waiting_request_that_pins_have_shut_out_fails_and_others_go_on(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=1))
        world.add(make_request("a", max_tokens=12, selection=select("a")))
        world.step(3)
        world.add(make_request("mix", selection=select("b", "c")))
        world.handle(PinAdapter(1, ref("p")))
        assert world.adapters.pins
        world.run()

        error = world.last("mix").error
        assert error is not None
        assert error.code == "adapter_never_fits"
        assert world.finish_reasons("a") == ["length"]
        world.assert_nothing_left()


class TestLoads:
    def test_a_load_that_never_ends_stalls_nobody_else(self) -> None:
        world = World()
        world.adapters.stuck = {ref("z").digest}
        world.add(make_request("z", selection=select("z")))
        world.step()
        world.add(make_request("base", max_tokens=20), make_request("a", max_tokens=20, selection=select("a")))
        world.step(25)

        assert world.finish_reasons("base") == ["length"]
        assert world.finish_reasons("a") == ["length"]
        for request_id in ("base", "a"):  # a token in every step from the first to the last
            steps = [index for index, tokens in enumerate(world.runner.num_tokens) if request_id in tokens]
            assert steps == list(range(steps[0], steps[0] + 20))
        assert world.core.stats().num_waiting_for_adapter == 1
        world.adapters.stuck.clear()
        world.run()
        assert world.tokens("z") == solo_tokens(make_request("", selection=select("z")))
        world.assert_nothing_left()

    def test_bad_adapters_fail_alone_among_twenty_streams(self) -> None:
        world = World(num_blocks=200, max_num_seqs=25, max_num_batched_tokens=100)
        bad = [f"bad{index}" for index in range(5)]
        world.adapters.broken = {ref(name).digest for name in bad}
        streams = [
            make_request(f"s{index}", [index, 2], max_tokens=20, selection=select("a") if index % 2 else BASE)
            for index in range(20)
        ]
        for index, stream in enumerate(streams):
            world.add(stream)
            if index % 4 == 0:
                world.add(make_request(bad[index // 4], selection=select(bad[index // 4])))
            world.step()
        world.run()

        for stream in streams:
            assert world.tokens(stream.request_id) == solo_tokens(stream)
        for name in bad:
            assert world.finish_reasons(name) == ["error"]
            error = world.last(name).error
            assert error is not None
            assert error.code == "adapter_load_failed"
        world.assert_nothing_left()

    def test_a_mix_fails_when_one_of_its_parts_does(self) -> None:
        world = World()
        world.adapters.broken = {ref("b").digest}
        world.add(make_request("mix", selection=select("a", "b")), make_request("a", selection=select("a")))
        world.run()

        assert world.finish_reasons("mix") == ["error"]
        assert world.finish_reasons("a") == ["length"]
        world.assert_nothing_left()

    def test_loads_in_a_loop_never_touch_the_slots_of_running_requests(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=LOAD_STEPS))
        requests = [make_request(name, max_tokens=64, selection=select(name)) for name in ("a1", "a2")]
        world.add(*requests)
        call_id = 0
        while world.core.scheduler.num_requests:
            for name in ("a3", "a4"):
                call_id += 1
                world.handle(LoadAdapter(call_id, ref(name)))
            world.step()
        world.run()

        for request in requests:
            assert world.tokens(request.request_id) == solo_tokens(request)
        assert len(world.replies) == call_id
        refused = [reply for reply in world.replies.values() if reply.error is not None]
        assert len(refused) > 50

    def test_those_who_wait_for_slots_are_prefetched(self) -> None:
        world = one_slot_world()
        world.add(make_request("a", max_tokens=20, selection=select("a")), make_request("b", selection=select("b")))
        world.step(5)
        assert ref("b").digest in world.adapters.prefetched
        assert "b" not in world.outputs

    @pytest.mark.parametrize("num_slots", [1, 2, 8])
    def test_more_adapters_than_slots_are_all_served(self, num_slots: int) -> None:
        world = World(adapters=FakeAdapters(num_slots=num_slots, load_steps=LOAD_STEPS))
        requests = [make_request(f"r{index}", selection=select(f"a{index % 8}")) for index in range(40)]
        world.add(*requests)
        world.run()
        for request in requests:
            assert world.tokens(request.request_id) == solo_tokens(request)
        world.assert_nothing_left()

    def test_requests_for_what_is_resident_go_together_so_that_slots_do_not_thrash(self) -> None:
        world = World(max_num_seqs=16, adapters=FakeAdapters(num_slots=2, load_steps=LOAD_STEPS))
        world.add(*(make_request(f"r{index}", selection=select(f"a{index % 8}")) for index in range(80)))
        world.run()
        assert len(world.adapters.loads) <= 80 / 4
        assert len(world.outputs) == 80

    def test_each_request_has_its_files_read_once_while_it_waits(self) -> None:
        world = World(max_num_seqs=1)
        world.add(make_request("first", max_tokens=20), *(make_request(n, selection=select(n)) for n in ("a", "b")))
        world.step(10)
        assert world.adapters.prefetched == [ref("a").digest, ref("b").digest]
        assert world.adapters.loads == []
