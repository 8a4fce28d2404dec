"""Pins, loads and unloads on demand, and what the manager tells of itself."""

from __future__ import annotations

import pytest

from loraplex.adapters.errors import NeverFitsError
from loraplex.adapters.ref import AdapterRef, LoraSelection
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import make_manager, settle
from tests.adapters.manager_world import SlowSource, World, acquire_now

single = LoraSelection.single


def test_what_can_never_fit_is_refused_with_both_numbers(world: World) -> None:
    manager = world.manager(num_slots=2)
    with pytest.raises(NeverFitsError, match="need 3 attention slots, and 2 of this server's 2 are not pinned"):
        manager.check_fits(single(AdapterRef("aa" * 32, 3, 0)))
    manager.check_fits(single(AdapterRef("aa" * 32, 2, 2)))


def test_pinned_slots_do_not_count_for_others_but_for_their_owner(world: World) -> None:
    pinned, other = world.add("pinned"), world.add("other", rank=8)
    manager = world.manager(num_slots=2)
    manager.pin(pinned)
    with pytest.raises(NeverFitsError, match="need 2 attention slots, and 1 of"):
        manager.check_fits(single(other))
    manager.check_fits(single(pinned))
    manager.unpin(pinned.digest)
    manager.check_fits(single(other))
    settle(manager)


def test_a_pin_loads_and_is_never_a_victim(world: World) -> None:
    pinned = world.add("pinned")
    manager = world.manager(num_slots=2)
    manager.pin(pinned)
    settle(manager)
    assert manager.is_loaded(pinned.digest)
    for name in "abc":
        selection = single(world.add(name))
        acquire_now(manager, selection)
        manager.release(selection)
    assert manager.is_loaded(pinned.digest)
    assert next(entry for entry in manager.resident() if entry.digest == pinned.digest).pinned


def test_a_pin_that_would_leave_no_free_slot_is_refused(world: World) -> None:
    a, b = world.add("a"), world.add("b")
    manager = world.manager(num_slots=2)
    manager.pin(a)
    manager.pin(a)
    with pytest.raises(NeverFitsError, match="no free attention slot: 2 of 2 would be pinned"):
        manager.pin(b)
    manager.unpin(a.digest)
    manager.pin(b)
    settle(manager)


def test_a_pin_never_locks_out_a_request_that_was_accepted(world: World) -> None:
    big, small = single(world.add("big", rank=8)), world.add("small")
    manager = world.manager(num_slots=2)
    manager.add_reference(big)
    with pytest.raises(NeverFitsError, match="already accepted"):
        manager.pin(small)
    manager.drop_reference(big)
    manager.pin(small)
    settle(manager)


def test_a_control_load_takes_no_lasting_lease(world: World) -> None:
    a, b = world.add("a"), world.add("b")
    manager = world.manager(num_slots=1)
    manager.load(a)
    settle(manager)
    assert manager.is_loaded(a.digest)
    assert manager.num_leases == 0
    acquire_now(manager, single(b))
    assert not manager.is_loaded(a.digest)
    manager.load(a)
    for _ in range(20):
        manager.advance()
    assert manager.is_resident(single(b))
    assert manager.has_pending_loads
    manager.release(single(b))
    settle(manager)
    assert manager.is_loaded(a.digest)


def test_more_control_loads_than_slots_do_not_chase_each_other(world: World) -> None:
    refs = [world.add(name) for name in "abcde"]
    manager = world.manager(num_slots=2, copy_bytes=1_000)
    for ref in refs:
        manager.load(ref)
    assert settle(manager) == []
    assert manager.stats.total_loads == 5
    assert world.source.num_fetches == 5


def test_a_control_load_that_cannot_be_read_is_reported(world: World) -> None:
    ref = AdapterRef("ee" * 32, 1, 0)
    manager = world.manager()
    manager.load(ref)
    assert [failure.digest for failure in settle(manager)] == [ref.digest]
    assert manager.resident() == ()


def test_a_control_load_that_pins_locked_out_is_reported(world: World) -> None:
    pinned, big = world.add("pinned"), world.add("big", rank=8)
    manager = world.manager(num_slots=2)
    acquire_now(manager, single(pinned))
    manager.load(big)
    manager.pin(pinned)
    [failure] = settle(manager)
    assert failure.digest == big.digest
    assert "need 2 attention slots" in failure.error.message
    manager.release(single(pinned))


def test_unload_frees_slot_and_host_copy_and_a_reload_reads_again(world: World) -> None:
    refs = [world.add(name) for name in "ab"]
    manager = world.manager(num_slots=2)
    for ref in refs:
        manager.load(ref)
    settle(manager)
    assert manager.unload(refs[1].digest)
    assert [entry.digest for entry in manager.resident()] == [refs[0].digest]
    host_bytes = manager.stats.host_bytes
    manager.load(refs[1])
    settle(manager)
    assert world.source.num_fetches == 3
    assert manager.stats.host_bytes == 2 * host_bytes


def test_unload_waits_for_leases_and_references(world: World) -> None:
    ref = world.add("a")
    selection = single(ref)
    manager = world.manager()
    manager.add_reference(selection)
    assert not manager.unload(ref.digest)
    acquire_now(manager, selection)
    manager.drop_reference(selection)
    assert not manager.unload(ref.digest)
    assert manager.is_resident(selection)
    manager.release(selection)
    assert manager.unload(ref.digest)
    assert manager.unload(ref.digest)
    assert (manager.resident(), manager.stats.host_bytes) == ((), 0)


def test_unload_of_a_load_under_way_leaves_nothing_behind(world: World) -> None:
    ref = world.add("a")
    source = SlowSource()
    source.folders = world.source.folders
    manager = make_manager(source)
    world.managers.append(manager)
    manager.load(ref)
    manager.advance()
    assert manager.unload(ref.digest)
    source.gate.set()
    while manager._loader._futures:
        assert manager.advance() == []
    assert (manager.resident(), manager.stats.host_bytes, manager.has_pending_loads) == ((), 0, False)


def test_a_version_unloaded_and_called_for_again_during_one_read_is_loaded(world: World) -> None:
    ref = world.add("a")
    source = SlowSource()
    source.folders = world.source.folders
    manager = make_manager(source)
    world.managers.append(manager)
    manager.load(ref)
    manager.advance()
    assert manager.unload(ref.digest)
    manager.load(ref)
    manager.advance()
    source.gate.set()
    assert settle(manager) == []
    assert manager.is_loaded(ref.digest)
    assert source.num_fetches == 1


def test_the_stats_count_what_is_there(world: World) -> None:
    selection = single(world.add("a", projections=tuple(Projection)))
    manager = world.manager(num_slots=3)
    manager.add_reference(selection)
    acquire_now(manager, selection)
    stats = manager.stats
    assert (stats.num_slots, stats.num_attention_slots_used, stats.num_mlp_slots_used) == (3, 1, 1)
    assert (stats.num_leases, stats.num_references, stats.num_pending_loads) == (1, 1, 0)
    [entry] = manager.resident()
    assert (entry.leases, entry.pinned, entry.is_loading) == (1, False, False)
    manager.release(selection)
    manager.drop_reference(selection)


def test_the_check_sees_a_lease_that_no_request_holds(world: World) -> None:
    ref = world.add("a")
    manager = world.manager()
    acquire_now(manager, single(ref))
    manager._leased.clear()
    assert "requests hold 0" in manager.check_integrity()[0]
    manager._leased[single(ref)] = 1
