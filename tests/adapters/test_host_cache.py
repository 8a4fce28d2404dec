from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.host_cache import HostCache
from loraplex.adapters.weights import AdapterWeights
from tests.adapters.helpers import BASE, FolderSource, lora_tensors, make_manager, settle, write_adapter


def weights(num_bytes: int) -> AdapterWeights:
    return AdapterWeights(modules=(), scaling=torch.zeros(0), num_bytes=num_bytes)


def test_a_budget_of_one_and_a_half_big_adapters_holds_one_big_or_many_small() -> None:
    big, small = 1_600, 400
    cache = HostCache(int(1.5 * big))
    assert cache.put("big", weights(big))
    assert all(cache.put(f"small{i}", weights(small)) for i in range(2))
    assert "big" in cache
    assert all(cache.put(f"other{i}", weights(small)) for i in range(4))
    assert "big" not in cache
    assert cache.num_bytes == 6 * small
    assert cache.put("big", weights(big))
    assert cache.num_bytes <= cache.max_bytes


def test_the_budget_counts_the_bytes_that_adapters_really_have(tmp_path: Path) -> None:
    """1.5 times a rank 16 holds one of it, or it leaves for four of rank 4, which are a quarter of its size each."""
    source = FolderSource()
    refs = {
        name: source.add(write_adapter(tmp_path / name, lora_tensors(rank=rank, seed=seed), r=rank))
        for seed, (name, rank) in enumerate({"big": 16, "a": 4, "b": 4, "c": 4, "d": 4}.items())
    }
    size = load_weights(tmp_path / "big", BASE).num_bytes
    manager = make_manager(source, num_slots=4, host_bytes=size * 3 // 2)
    held = []
    for ref in refs.values():
        manager.load(ref)
        assert settle(manager) == []
        held.append(manager.stats.host_bytes)
    assert held == [size, size * 5 // 4, size * 3 // 2, size * 3 // 4, size]
    for name in "abcd":
        manager.load(refs[name])
    assert settle(manager) == []
    assert source.num_fetches == 5, "four of rank 4 are there"
    manager.load(refs["big"])
    assert settle(manager) == []
    assert source.num_fetches == 6, "the big one had left"
    manager.close()


def test_what_is_larger_than_the_budget_is_not_kept_and_evicts_nothing() -> None:
    cache = HostCache(100)
    assert cache.put("a", weights(60))
    assert not cache.put("b", weights(101))
    assert "a" in cache


def test_the_least_recently_used_leaves_first() -> None:
    cache = HostCache(100)
    for digest in "abc":
        cache.put(digest, weights(30))
    cache.get("a")
    cache.put("d", weights(30))
    assert [digest in cache for digest in "abcd"] == [True, False, True, True]


def test_referenced_copies_never_leave_for_others() -> None:
    cache = HostCache(100)
    cache.add_reference("a")
    cache.put("a", weights(60))
    assert not cache.put("b", weights(60))
    cache.drop_reference("a")
    assert cache.put("b", weights(60))
    assert "a" not in cache


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.booleans()), max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_bound_and_the_references_hold_always(steps: list[tuple[str, int, bool]]) -> None:
    cache = HostCache(100)
    referenced: set[str] = set()
    for digest, num_bytes, keep in steps:
        if digest not in cache:
            cache.put(digest, weights(num_bytes))
        if keep and digest in cache and digest not in referenced:
            cache.add_reference(digest)
            referenced.add(digest)
        assert cache.check_integrity() == []
        assert all(other in cache for other in referenced)
