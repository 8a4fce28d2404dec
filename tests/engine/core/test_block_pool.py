from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from loraplex.engine.core.block_pool import BlockPool

NUM_BLOCKS = 6


def test_least_recently_released_cached_block_is_taken_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    for block_id in blocks:
        pool.publish(block_id, bytes([block_id]), ())
    pool.release([blocks[1]])
    pool.release([blocks[0]])
    pool.release([blocks[2]])

    assert pool.take(1) == [blocks[1]]
    assert pool.find(bytes([blocks[1]])) is None
    assert pool.find(bytes([blocks[0]])) == blocks[0]


def test_the_tail_of_a_table_is_taken_before_its_head() -> None:
    pool = BlockPool(3)
    table = pool.take(3)
    for block_id in table:
        pool.publish(block_id, bytes([block_id]), ())
    pool.release(table)

    assert pool.take(2) == [table[2], table[1]]


def test_blocks_that_cache_nothing_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    cached, plain = pool.take(2)
    pool.publish(cached, b"key", ())
    pool.release([cached])
    pool.release([plain])

    assert pool.take(1) == [plain]


def test_a_shared_block_comes_back_to_life_and_is_not_taken() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.publish(block_id, b"key", ())
    pool.release([block_id])
    pool.share([block_id])

    assert pool.num_free == 1
    assert pool.take(1) != [block_id]


def test_of_two_equal_blocks_the_first_stays_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(2)
    pool.publish(first, b"key", ())
    pool.publish(second, b"key", ())

    assert pool.find(b"key") == first
    pool.release([first, second])
    assert pool.check_integrity([]) == []


def test_dirty_blocks_are_found_no_more_and_zeroed_once_when_taken() -> None:
    pool = BlockPool(2)
    table = pool.take(2)
    pool.publish(table[0], b"key", ())
    pool.mark_dirty(table)
    pool.release(table)

    assert pool.find(b"key") is None
    assert pool.take_blocks_to_zero() == ()
    assert sorted(pool.take(2)) == sorted(table)
    assert sorted(pool.take_blocks_to_zero()) == sorted(table)
    assert pool.take_blocks_to_zero() == ()


def test_dropping_an_adapter_forgets_its_blocks_alone_and_in_mixes_only() -> None:
    pool = BlockPool(4)
    base, alone, mixed, other = pool.take(4)
    for block_id, adapters in ((base, ()), (alone, ("a",)), (mixed, ("a", "b")), (other, ("b",))):
        pool.publish(block_id, bytes([block_id]), adapters)
    pool.release([base, alone])
    pool.drop_cached("a")

    found = [block_id for block_id in (base, alone, mixed, other) if pool.find(bytes([block_id])) is not None]
    assert found == [base, other]
    assert pool.check_integrity([[mixed, other]]) == []


def test_integrity_names_a_block_that_no_table_holds() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    assert pool.check_integrity([]) == [f"block {block_id} is counted 1 times and stands in 0 tables"]


class PoolMachine(RuleBasedStateMachine):
    """Random tables taken, shared, published, poisoned and released."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.dirty: set[int] = set()

    @rule(count=st.integers(1, 3))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        table = self.pool.take(count)
        assert set(self.pool.take_blocks_to_zero()) == self.dirty & set(table)
        self.dirty -= set(table)
        assert not any(block_id in other for other in self.tables for block_id in table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pool.release(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1), adapter=st.sampled_from(["a", "b"]))
    def publish(self, data: st.DataObject, key: bytes, adapter: str) -> None:
        block_id = data.draw(st.sampled_from(data.draw(st.sampled_from(self.tables))))
        if self.pool.key_of(block_id) is None and block_id not in self.dirty:
            self.pool.publish(block_id, key, (adapter,))

    @rule(key=st.binary(min_size=1, max_size=1))
    def share(self, key: bytes) -> None:
        block_id = self.pool.find(key)
        if block_id is not None:
            self.pool.share([block_id])
            self.tables.append([block_id])

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def poison(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.mark_dirty(table)
        self.dirty |= set(table)

    @rule(adapter=st.sampled_from(["a", "b"]))
    def drop(self, adapter: str) -> None:
        self.pool.drop_cached(adapter)

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.check_integrity(self.tables) == []
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS
        assert self.pool.num_used == len({block_id for table in self.tables for block_id in table})


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestRandomTables = PoolMachine.TestCase
