from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.slot_pool import Admission, SlotPool


def make_ref(name: str, attention: int = 1, mlp: int = 1) -> AdapterRef:
    return AdapterRef(name, attention, mlp)


def admit(pool: SlotPool, *refs: AdapterRef) -> Admission:
    admission = pool.admit(refs)
    assert admission is not None
    return admission


def use(pool: SlotPool, ref: AdapterRef, times: int = 1) -> None:
    for _ in range(times):
        admit(pool, ref)
        pool.lease(ref.digest)
        pool.unlease(ref.digest)


def test_equal_adapters_used_once_leave_in_the_order_of_their_last_use() -> None:
    pool = SlotPool(3)
    for name in "abc":
        use(pool, make_ref(name))
    for newcomer, victim in zip("def", "abc", strict=True):
        assert admit(pool, make_ref(newcomer)).evicted == (victim,)
        use(pool, make_ref(newcomer))


def test_a_big_adapter_that_is_often_used_outstays_small_ones_used_since() -> None:
    pool = SlotPool(6)
    use(pool, make_ref("big", 4, 4), times=5)
    for name in "abcdef":
        use(pool, make_ref(name))
    assert "big" in pool


def test_an_old_favourite_cools_and_leaves() -> None:
    pool = SlotPool(2, half_life=8)
    use(pool, make_ref("favourite"), times=50)
    for i in range(200):
        use(pool, make_ref(f"n{i % 3}"))
    assert "favourite" not in pool


def test_a_leased_adapter_is_never_a_victim() -> None:
    pool = SlotPool(2)
    admit(pool, make_ref("a"), make_ref("b"))
    pool.lease("a")
    pool.lease("b")
    assert pool.admit([make_ref("c")]) is None
    pool.unlease("b")
    assert admit(pool, make_ref("c")).evicted == ("b",)


def test_a_pinned_adapter_is_never_a_victim() -> None:
    pool = SlotPool(2)
    admit(pool, make_ref("a"), make_ref("b"))
    pool.pin(make_ref("a"))
    assert admit(pool, make_ref("c")).evicted == ("b",)
    assert pool.admit([make_ref("d"), make_ref("e")]) is None
    pool.unpin("a")
    assert set(admit(pool, make_ref("d"), make_ref("e")).evicted) == {"a", "c"}


def test_slots_are_given_in_both_spaces_or_not_at_all() -> None:
    pool = SlotPool(4)
    admit(pool, make_ref("a", 0, 4))
    pool.lease("a")
    assert pool.admit([make_ref("b", 1, 0), make_ref("c", 1, 1)]) is None
    assert "b" not in pool
    assert pool.num_attention_slots_used == 0
    admit(pool, make_ref("b", 4, 0))
    assert (pool.num_attention_slots_used, pool.num_mlp_slots_used) == (4, 4)


def test_parts_that_are_there_are_not_evicted_for_the_others() -> None:
    pool = SlotPool(2)
    admit(pool, make_ref("a"), make_ref("b"))
    admission = admit(pool, make_ref("a"), make_ref("c"))
    assert admission == Admission(admitted=("c",), evicted=("b",))


def test_only_victims_in_the_space_that_lacks_slots_leave() -> None:
    pool = SlotPool(2)
    admit(pool, make_ref("attention", 2, 0), make_ref("mlp", 0, 2))
    assert admit(pool, make_ref("new", 0, 1)).evicted == ("mlp",)
    assert "attention" in pool


def test_no_more_victims_leave_than_are_needed() -> None:
    pool = SlotPool(5)
    admit(pool, make_ref("small"), make_ref("big", 4, 4))
    use(pool, make_ref("big", 4, 4))
    assert admit(pool, make_ref("new", 4, 4)).evicted == ("big",)
    assert "small" in pool


def test_an_idle_spared_adapter_stays() -> None:
    pool = SlotPool(1)
    admit(pool, make_ref("a"))
    assert pool.admit([make_ref("b")], spared=["a"]) is None


def test_giving_back_a_lease_that_nobody_has_is_a_fault() -> None:
    pool = SlotPool(1)
    admit(pool, make_ref("a"))
    with pytest.raises(AssertionError, match="no lease"):
        pool.unlease("a")


def test_the_check_sees_a_slot_with_two_owners_and_a_lost_one() -> None:
    pool = SlotPool(2)
    admit(pool, make_ref("a"))
    assert pool.check_integrity() == []
    pool._free_attention[:] = [0]  # 0 is a's, 1 is nowhere
    assert pool.check_integrity() == ["attention slot 0 has 2 owners", "attention slot 1 is lost"]


REFS = [make_ref(f"r{i}", *counts) for i, counts in enumerate([(1, 1), (2, 0), (0, 2), (3, 1), (1, 3), (4, 4), (2, 2)])]


class PoolMachine(RuleBasedStateMachine):
    """The pool against a plain model: who is leased or pinned, and which slots each held when first seen."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(5, half_life=4)
        self.leases: dict[str, int] = {}
        self.held: dict[str, object] = {}

    @rule(refs=st.lists(st.sampled_from(REFS), min_size=1, max_size=3, unique=True), lease=st.booleans())
    def admit(self, refs: list[AdapterRef], lease: bool) -> None:
        before = {ref.digest for ref in self.pool}
        admission = self.pool.admit(refs)
        after = {ref.digest for ref in self.pool}
        if admission is None:
            assert after == before
            assert not self.could_fit(refs)
            return
        assert after == (before - set(admission.evicted)) | set(admission.admitted)
        assert not any(self.is_protected(digest) for digest in admission.evicted)
        assert {ref.digest for ref in refs} <= after
        for digest in admission.evicted:
            self.held.pop(digest, None)
        for ref in refs:
            self.held.setdefault(ref.digest, self.pool.slots(ref.digest))
            if lease:
                self.pool.lease(ref.digest)
                self.leases[ref.digest] = self.leases.get(ref.digest, 0) + 1

    def could_fit(self, refs: list[AdapterRef]) -> bool:
        wanted = {ref.digest for ref in refs}
        kept = [ref for ref in self.pool if self.is_protected(ref.digest) and ref.digest not in wanted]
        return (
            sum(ref.num_attention_slots for ref in [*kept, *refs]) <= 5
            and sum(ref.num_mlp_slots for ref in [*kept, *refs]) <= 5
        )

    def is_protected(self, digest: str) -> bool:
        return self.leases.get(digest, 0) > 0 or self.pool.is_pinned(digest)

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def unlease(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(digest for digest, num in self.leases.items() if num)))
        self.pool.unlease(digest)
        self.leases[digest] -= 1

    @rule(ref=st.sampled_from(REFS))
    def pin(self, ref: AdapterRef) -> None:
        self.pool.pin(ref)

    @rule(ref=st.sampled_from(REFS))
    def unpin(self, ref: AdapterRef) -> None:
        self.pool.unpin(ref.digest)

    @rule(ref=st.sampled_from(REFS))
    def free(self, ref: AdapterRef) -> None:
        if ref.digest in self.pool and not self.leases.get(ref.digest):
            self.pool.free(ref.digest)
            self.held.pop(ref.digest, None)

    @invariant()
    def no_slot_is_lost_or_shared(self) -> None:
        assert self.pool.check_integrity() == []
        assert self.pool.num_leases == sum(self.leases.values())

    @invariant()
    def a_holder_keeps_its_slots(self) -> None:
        for digest, slots in self.held.items():
            assert self.pool.slots(digest) == slots


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_the_pool_keeps_its_promises_in_any_order = PoolMachine.TestCase
