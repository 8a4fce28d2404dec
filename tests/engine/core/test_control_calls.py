"""Load, unload, pin, unpin and integrity: each is answered once, when it is true."""

from __future__ import annotations

from loraplex.engine.messages import GetIntegrity, LoadAdapter, PinAdapter, UnloadAdapter, UnpinAdapter
from tests.engine.core.fake_adapters import FakeAdapters
from tests.engine.core.world import World, make_request, ref, select, solo_tokens


def error_code(world: World, call_id: int) -> str | None:
    error = world.replies[call_id].error
    return None if error is None else error.code


class TestLoad:
    def test_it_is_answered_when_the_adapter_is_resident_and_leaves_no_lease(self) -> None:
        world = World(adapters=FakeAdapters(load_steps=3))
        world.handle(LoadAdapter(1, ref("a")))
        world.step(2)
        assert world.replies == {}
        world.run()

        assert error_code(world, 1) is None
        assert [entry.digest for entry in world.core.stats().resident] == [ref("a").digest]
        world.assert_nothing_left()

    def test_the_first_request_after_it_waits_for_no_load(self) -> None:
        world = World(adapters=FakeAdapters(load_steps=3))
        world.handle(LoadAdapter(1, ref("a")))
        world.run()
        world.add(make_request("r", selection=select("a")))
        assert world.run_until_started("r") == 1

    def test_a_failure_is_answered_with_the_loads_error(self) -> None:
        world = World()
        world.adapters.broken = {ref("bad").digest}
        world.handle(LoadAdapter(1, ref("bad")))
        world.handle(LoadAdapter(2, ref("good")))
        world.run()

        assert error_code(world, 1) == "adapter_load_failed"
        assert error_code(world, 2) is None
        world.assert_nothing_left()

    def test_what_never_fits_is_refused_at_once(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2))
        world.handle(LoadAdapter(1, ref("huge", attention=3)))
        world.run()
        assert error_code(world, 1) == "adapter_never_fits"

    def test_more_loads_than_slots_take_turns(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=2))
        for call_id in range(5):
            world.handle(LoadAdapter(call_id, ref(f"a{call_id}")))
        world.run()
        assert [error_code(world, call_id) for call_id in range(5)] == [None] * 5
        assert len(world.core.stats().resident) == 2

    def test_it_takes_no_slot_that_a_request_waits_for(self) -> None:
        """A mix needs both slots; loads that come one after the other must not keep one of them busy."""
        world = World(adapters=FakeAdapters(num_slots=2, load_steps=2))
        world.add(make_request("a", selection=select("a"), max_tokens=6), make_request("c", selection=select("c")))
        world.step(4)
        mix = make_request("mix", selection=select("x", "y"))
        world.add(mix)
        for call_id in range(40):
            world.handle(LoadAdapter(call_id, ref(f"load{call_id}")))
            world.step()

        assert world.tokens("mix") == solo_tokens(mix)
        world.run()
        assert len(world.replies) == 40

    def test_a_load_that_hangs_gives_way_to_a_request_that_needs_its_slot(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=1, stuck={ref("hangs").digest}))
        world.handle(LoadAdapter(1, ref("hangs")))
        world.step(3)
        request = make_request("r", selection=select("a"))
        world.add(request)
        world.run()

        assert error_code(world, 1) == "no_free_slots"
        assert world.tokens("r") == solo_tokens(request)
        world.assert_nothing_left()


class TestUnload:
    def test_it_waits_for_the_requests_that_use_the_adapter(self) -> None:
        world = World()
        running = make_request("running", max_tokens=8, selection=select("a"))
        world.add(running)
        world.step(4)
        world.handle(UnloadAdapter(1, ref("a").digest))
        world.step(2)
        assert world.replies == {}
        world.run()

        assert error_code(world, 1) is None
        assert world.tokens("running") == solo_tokens(running)
        assert world.core.stats().resident == ()

    def test_it_waits_for_queued_requests_too(self) -> None:
        world = World(max_num_seqs=1)
        world.add(make_request("first", max_tokens=8), make_request("queued", selection=select("a")))
        world.step()
        world.handle(UnloadAdapter(1, ref("a").digest))
        world.run()

        assert world.finish_reasons("queued") == ["length"]
        assert error_code(world, 1) is None
        world.assert_nothing_left()

    def test_it_returns_after_every_user_was_aborted(self) -> None:
        world = World()
        world.add(*(make_request(f"r{i}", selection=select("a")) for i in range(6)))
        world.step(3)
        world.handle(UnloadAdapter(1, ref("a").digest))
        world.core.abort([f"r{i}" for i in range(6)])
        world.step()
        assert error_code(world, 1) is None

    def test_of_an_adapter_that_is_not_resident_it_is_answered_at_once(self) -> None:
        world = World()
        world.handle(UnloadAdapter(1, ref("never seen").digest))
        world.step()
        assert error_code(world, 1) is None

    def test_load_and_unload_by_turns_leave_nothing(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2))
        for cycle in range(50):
            name = f"a{cycle % 10}"
            world.handle(LoadAdapter(2 * cycle, ref(name)))
            world.add(make_request(f"r{cycle}", selection=select(name)))
            world.run()
            world.handle(UnloadAdapter(2 * cycle + 1, ref(name).digest))
            world.run()
            assert world.core.stats().resident == ()
        assert all(reply.error is None for reply in world.replies.values())
        assert world.core.stats().num_blocks_cached == 0
        world.assert_nothing_left()


class TestPins:
    def test_a_pinned_adapter_is_never_a_victim_until_it_is_unpinned(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2))
        world.handle(PinAdapter(1, ref("pinned")))
        for index in range(4):
            world.add(make_request(f"r{index}", selection=select(f"a{index}")))
        world.run()
        assert ref("pinned").digest in {entry.digest for entry in world.core.stats().resident if entry.pinned}

        world.handle(UnpinAdapter(2, ref("pinned").digest))
        for index in range(4, 8):
            world.add(make_request(f"r{index}", selection=select(f"a{index}")))
        world.run()
        assert ref("pinned").digest not in {entry.digest for entry in world.core.stats().resident}
        assert error_code(world, 1) is error_code(world, 2) is None

    def test_the_pin_that_would_take_the_last_slot_is_refused(self) -> None:
        world = World(adapters=FakeAdapters(num_slots=2))
        world.handle(PinAdapter(1, ref("a")))
        world.handle(PinAdapter(2, ref("b")))
        world.run()
        assert [error_code(world, 1), error_code(world, 2)] == [None, "adapter_never_fits"]


class TestIntegrity:
    def test_it_counts_what_is_held(self) -> None:
        world = World(block_size=4)
        world.add(make_request("r", 9, selection=select("a", "b")), make_request("base", 4))
        world.step(2)
        world.handle(GetIntegrity(1))
        world.step()

        report = world.replies[1].integrity
        assert report is not None
        assert (report.num_requests, report.num_blocks_in_use, report.num_leases, report.num_references) == (2, 5, 2, 2)
        assert report.faults == ()

    def test_it_names_a_fault(self) -> None:
        world = World()
        world.add(make_request("r"))
        world.core.step()
        world.runner.steps[-1].scheduled[0].request.block_ids.pop()
        assert any("block" in fault for fault in world.core.integrity().faults)
