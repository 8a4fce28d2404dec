from __future__ import annotations

from collections.abc import Iterator

import pytest

from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.ref import BASE as BASE_SELECTION
from loraplex.adapters.ref import AdapterRef, LoraSelection, SelectionPart
from loraplex.adapters.residency import Residency
from loraplex.adapters.slot_tensors import SlotTensors
from loraplex.kernels.lora.metadata import Projection, WeightedSlot
from tests.adapters.helpers import BASE, QV, lora_tensors, make_manager, settle, write_adapter
from tests.adapters.manager_world import SlowSource, World, acquire_now, assert_holds, drain

single = LoraSelection.single


def test_the_base_needs_nothing(world: World) -> None:
    manager = world.manager()
    assert manager.acquire(BASE_SELECTION) is Residency.RESIDENT
    assert manager.is_resident(BASE_SELECTION)
    assert manager.slots(BASE_SELECTION) == ((), ())
    manager.release(BASE_SELECTION)
    assert manager.num_leases == 0


def test_a_selection_is_published_only_when_it_is_complete(world: World) -> None:
    selection = single(world.add("a", rank=7))
    manager = world.manager(copy_bytes=2_000)
    assert manager.acquire(selection) is Residency.LOADING
    num_advances = 0
    while not manager.is_resident(selection):
        with pytest.raises(AssertionError, match="published"):
            manager.slots(selection)
        manager.advance()
        num_advances += 1
    assert num_advances > 10
    assert_holds(manager, selection, world.tmp_path / "a")
    assert manager.acquire(selection) is Residency.RESIDENT


def test_a_call_copies_a_bounded_number_of_bytes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = world.manager(copy_bytes=3_000)
    copied: list[int] = []
    write = SlotTensors.write

    def recording(*args: object, **kwargs: object) -> Iterator[int]:
        for num_bytes in write(*args, **kwargs):  # type: ignore[arg-type]  # passed through
            copied.append(num_bytes)
            yield num_bytes

    monkeypatch.setattr(SlotTensors, "write", recording)
    manager.acquire(single(world.add("a")))
    while manager.has_pending_loads:
        copied.clear()
        manager.advance()
        assert sum(copied) <= 3_000


def test_a_mix_keeps_the_order_of_its_parts_and_their_weights(world: World) -> None:
    a, b = world.add("a", rank=8, projections=tuple(Projection)), world.add("b")
    selection = LoraSelection.of([SelectionPart(a, 0.5), SelectionPart(b, -2.0)])
    manager = world.manager(num_slots=4)
    acquire_now(manager, selection)
    slots = manager.slots(selection)
    order = [part.ref.digest for part in selection.parts]
    weights = [-2.0, 0.5, 0.5] if order[0] == b.digest else [0.5, 0.5, -2.0]
    assert [slot.weight for slot in slots.attention] == weights
    assert [slot.weight for slot in slots.mlp] == [0.5, 0.5]
    assert len({slot.slot_id for slot in slots.attention}) == 3
    assert all(isinstance(slot, WeightedSlot) for slot in slots.attention)


def test_a_leased_slot_is_never_given_away_and_no_room_changes_nothing(world: World) -> None:
    a, b, c = (single(world.add(name)) for name in "abc")
    manager = world.manager(num_slots=2)
    acquire_now(manager, a)
    acquire_now(manager, b)
    before = manager.resident(), manager.slots(a), manager.slots(b)
    assert manager.acquire(c) is Residency.NO_ROOM
    assert (manager.resident(), manager.slots(a), manager.slots(b)) == before
    manager.release(a)
    acquire_now(manager, c)
    assert_holds(manager, b, world.tmp_path / "b")
    assert_holds(manager, c, world.tmp_path / "c")
    assert not manager.is_resident(a)
    assert manager.stats.total_evictions == 1


def test_released_weights_stay_as_cache_and_nothing_is_read_again(world: World) -> None:
    selection = single(world.add("a"))
    manager = world.manager()
    acquire_now(manager, selection)
    manager.release(selection)
    for _ in range(10):
        assert manager.acquire(selection) is Residency.RESIDENT
        manager.advance()
        manager.release(selection)
    assert world.source.num_fetches == 1
    assert manager.stats.total_loads == 1


def test_an_evicted_version_comes_back_from_host_memory_without_a_read(world: World) -> None:
    a, b = single(world.add("a")), single(world.add("b"))
    manager = world.manager(num_slots=1)
    for selection in (a, b, a):
        acquire_now(manager, selection)
        manager.release(selection)
    assert world.source.num_fetches == 2
    assert manager.stats.total_loads == 3


def test_without_host_memory_every_load_reads_and_still_works(world: World) -> None:
    a, b = single(world.add("a")), single(world.add("b"))
    manager = world.manager(num_slots=1, host_bytes=0)
    for selection, name in ((a, "a"), (b, "b"), (a, "a")):
        acquire_now(manager, selection)
        assert_holds(manager, selection, world.tmp_path / name)
        manager.release(selection)
    assert world.source.num_fetches == 3
    assert manager.stats.host_bytes == 0


def test_many_requests_for_one_version_read_it_once(world: World) -> None:
    selection = single(world.add("a"))
    manager = world.manager()
    for _ in range(5):
        assert manager.acquire(selection) is Residency.LOADING
    settle(manager)
    assert world.source.num_fetches == 1
    assert manager.num_leases == 5
    for _ in range(5):
        manager.release(selection)
    assert manager.num_leases == 0


def test_a_failed_load_concerns_its_digest_alone_and_gives_the_slots_back(world: World) -> None:
    good, bad = world.add("good"), AdapterRef("ee" * 32, 1, 0)
    manager = world.manager(num_slots=2)
    mix = LoraSelection.of([SelectionPart(good), SelectionPart(bad)])
    assert manager.acquire(mix) is Residency.LOADING
    assert manager.acquire(single(bad)) is Residency.LOADING
    assert manager.num_leases == 3
    [failure] = settle(manager)
    assert failure.digest == bad.digest
    assert not manager.is_resident(mix)
    manager.release(mix)
    manager.release(single(bad))
    assert manager.is_resident(single(good))
    assert [entry.digest for entry in manager.resident()] == [good.digest]
    assert manager.stats.num_attention_slots_used == 1


def test_a_failed_load_is_tried_again_by_the_next_acquire(world: World) -> None:
    ref = world.add("a")
    folder = world.source.folders.pop(ref.digest)
    manager = world.manager()
    selection = single(ref)
    manager.acquire(selection)
    assert [failure.digest for failure in settle(manager)] == [ref.digest]
    world.source.folders[ref.digest] = folder
    acquire_now(manager, selection)
    manager.release(selection)
    manager.release(selection)


@pytest.mark.parametrize("change", ["config", "weights", "gone"])
def test_files_that_changed_since_the_upload_are_not_served(world: World, change: str) -> None:
    ref = world.add("a")
    if change == "config":
        write_adapter(world.tmp_path / "a", lora_tensors(rank=4, projections=QV), r=4, lora_alpha=32)
    elif change == "weights":
        write_adapter(world.tmp_path / "a", lora_tensors(rank=4, projections=QV, seed=99), r=4)
    else:
        (world.tmp_path / "a" / "adapter_model.safetensors").unlink()
    manager = world.manager()
    manager.acquire(single(ref))
    [failure] = settle(manager)
    assert failure.digest == ref.digest
    assert "altered" in failure.error.message or change == "gone"
    manager.release(single(ref))
    assert manager.resident() == ()


def test_a_reference_that_claims_too_few_slots_fails_instead_of_cutting_ranks(world: World) -> None:
    ref = world.add("a", rank=8)
    wrong = AdapterRef(ref.digest, 1, 0)
    manager = world.manager()
    manager.acquire(single(wrong))
    [failure] = settle(manager)
    assert "rank 8" in failure.error.message
    manager.release(single(wrong))


def test_a_slot_that_changed_hands_during_a_load_holds_its_new_owner(world: World) -> None:
    a, b = single(world.add("a", rank=8)), single(world.add("b", rank=8))
    manager = world.manager(num_slots=2, copy_bytes=1_000)
    manager.acquire(a)
    while not manager._loads._copying:
        manager.advance()
    manager.release(a)  # aborted in the middle of the copy
    assert manager.acquire(b) is Residency.LOADING
    settle(manager)
    assert_holds(manager, b, world.tmp_path / "b")
    assert not manager.is_resident(a)


def test_a_slow_read_stalls_nobody(world: World) -> None:
    slow, quick = single(world.add("slow")), single(world.add("quick"))
    source = SlowSource()
    source.folders = world.source.folders
    manager = make_manager(source, num_slots=2)
    world.managers.append(manager)
    manager.acquire(slow)
    for _ in range(100):
        assert manager.advance() == []
    assert manager.acquire(slow) is Residency.LOADING
    assert manager.has_pending_loads
    source.gate.set()
    acquire_now(manager, quick)
    assert manager.is_resident(slow)


def test_an_aborted_load_is_evicted_when_its_slots_are_needed(world: World) -> None:
    a, b = single(world.add("a")), single(world.add("b"))
    source = SlowSource()
    source.folders = world.source.folders
    manager = make_manager(source, num_slots=1)
    world.managers.append(manager)
    manager.acquire(a)
    manager.release(a)
    assert manager.acquire(b) is Residency.LOADING
    source.gate.set()
    settle(manager)
    assert_holds(manager, b, world.tmp_path / "b")


def test_referenced_versions_keep_their_host_copy(world: World) -> None:
    a, b = single(world.add("a")), single(world.add("b"))
    size = load_weights(world.tmp_path / "a", BASE).num_bytes
    manager = world.manager(num_slots=1, host_bytes=size)
    manager.add_reference(a)
    for selection in (a, b, a):
        acquire_now(manager, selection)
        manager.release(selection)
    assert world.source.num_fetches == 2
    assert manager.num_references == 1
    manager.drop_reference(a)
    assert manager.num_references == 0


def test_a_prefetch_reads_to_host_memory_and_takes_no_slot(world: World) -> None:
    selections = [single(world.add(name)) for name in "abc"]
    manager = world.manager()
    for selection in selections:
        manager.add_reference(selection)
        manager.prefetch(selection)
    drain(manager)
    assert (world.source.num_fetches, manager.stats.num_attention_slots_used) == (3, 0)
    for selection in selections[:2]:
        acquire_now(manager, selection)
    assert world.source.num_fetches == 3


def test_a_prefetch_leaves_a_thread_to_the_loads_that_requests_wait_for(world: World) -> None:
    source = SlowSource()
    source.folders = world.source.folders
    selections = [single(world.add(name)) for name in "abcd"]
    manager = make_manager(source)
    world.managers.append(manager)
    for selection in selections:
        manager.add_reference(selection)
        manager.prefetch(selection)
    for _ in range(5):
        manager.advance()
    assert len(manager._loader.loading) == 1
    source.gate.set()
    drain(manager)
    assert source.num_fetches == 4


def test_a_prefetch_for_a_request_that_has_left_is_not_begun(world: World) -> None:
    selection = single(world.add("a"))
    manager = world.manager()
    manager.add_reference(selection)
    manager.prefetch(selection)
    manager.drop_reference(selection)
    drain(manager)
    assert world.source.num_fetches == 0


def test_a_prefetch_that_fails_or_finds_no_room_is_not_repeated(world: World) -> None:
    selection, broken = single(world.add("a")), single(AdapterRef("ee" * 32, 1, 0))
    manager = world.manager(host_bytes=10)
    for wanted in (selection, broken):
        manager.add_reference(wanted)
        manager.prefetch(wanted)
    for _ in range(3):
        drain(manager)
    assert world.source.num_fetches == 2
