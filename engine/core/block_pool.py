"""The KV blocks of the device: who holds them, which of them are a cached prefix, which must be zeroed.

          take                     release
    free ------> held (count 1) ------------> free, at the end of the LRU list (its key stays: cached)
     ^             |  ^ share (count + 1)           |
     |             |  +-----------------------------+  share: a cached block comes back to life
     +-------------+ a block that is taken loses its key

A block is free exactly when its count is 0. Free blocks without a key are taken before cached ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, the LRU list of free blocks, and the cache of full blocks by key. All calls O(blocks given)."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._adapters: list[tuple[str, ...]] = [()] * num_blocks  # digests that a cached block was computed under
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # next to be taken first
        self._num_free_cached = 0
        self._dirty: set[int] = set()  # hold non-finite values
        self._to_zero: list[int] = []  # dirty blocks taken since the last take_blocks_to_zero

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    @property
    def num_free_cached(self) -> int:
        """Free blocks that are still a prefix."""
        return self._num_free_cached

    def is_free(self, block_id: int) -> bool:
        return self._ref_counts[block_id] == 0

    def find(self, key: bytes) -> int | None:
        """The block cached under the key, held or free."""
        return self._cached.get(key)

    def key_of(self, block_id: int) -> bytes | None:
        """What the block is cached under."""
        return self._keys[block_id]

    def take(self, count: int) -> list[int]:
        """`count` free blocks, least recently used first; they lose what they cached."""
        assert count <= len(self._free), "the caller checks num_free"
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            if self._keys[block_id] is not None:
                self._num_free_cached -= 1
                self._forget(block_id)
            self._ref_counts[block_id] = 1
            if block_id in self._dirty:
                self._dirty.remove(block_id)
                self._to_zero.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold cached blocks once more."""
        for block_id in block_ids:
            assert self._keys[block_id] is not None, "only cached blocks are shared"
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
                self._num_free_cached -= 1
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back a table. Its tail becomes a victim before its head, which more requests may have in common."""
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, "released more often than taken"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._add_free(block_id)

    def publish(self, block_id: int, key: bytes, adapters: tuple[str, ...]) -> None:
        """Let a full, computed, held block be found. Of two equal blocks the first stays the one that is found."""
        assert self._ref_counts[block_id] > 0
        assert self._keys[block_id] is None, "a block is filled once"
        if key not in self._cached:
            self._cached[key] = block_id
            self._keys[block_id] = key
            self._adapters[block_id] = adapters

    def mark_dirty(self, block_ids: Iterable[int]) -> None:
        """Held blocks that hold non-finite values: found no more, and zeroed before their next holder uses them."""
        for block_id in block_ids:
            self._forget(block_id)
            self._dirty.add(block_id)

    def drop_cached(self, adapter_digest: str) -> None:
        """Forget every block that was computed under the adapter, alone or in a mix. O(cached blocks), for unloads."""
        for block_id in [b for b in self._cached.values() if adapter_digest in self._adapters[b]]:
            self._forget(block_id)
            if self._ref_counts[block_id] == 0:
                self._num_free_cached -= 1
                self._free.move_to_end(block_id, last=False)

    def take_blocks_to_zero(self) -> tuple[int, ...]:
        """Blocks that were taken since the last call and must be zeroed before anything reads or writes them."""
        to_zero, self._to_zero = tuple(self._to_zero), []
        return to_zero

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """Faults, given the block tables of all requests."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                expected[block_id] += 1
        faults = [
            f"block {block_id} is counted {count} times and stands in {expected[block_id]} tables"
            for block_id, count in enumerate(self._ref_counts)
            if count != expected[block_id]
        ]
        faults += [
            f"block {block_id} is {'not ' if count == 0 else ''}free with count {count}"
            for block_id, count in enumerate(self._ref_counts)
            if (count == 0) != (block_id in self._free)
        ]
        faults += [
            f"block {block_id} is cached under a key that it does not carry"
            for key, block_id in self._cached.items()
            if self._keys[block_id] != key
        ]
        if (carried := self.num_blocks - self._keys.count(None)) != len(self._cached):
            faults.append(f"{carried} blocks carry a key and {len(self._cached)} are cached")
        if (cached := sum(self._keys[block_id] is not None for block_id in self._free)) != self._num_free_cached:
            faults.append(f"{cached} free blocks are cached and {self._num_free_cached} are counted")
        return faults

    def _add_free(self, block_id: int) -> None:
        self._free[block_id] = None
        if self._keys[block_id] is None:
            self._free.move_to_end(block_id, last=False)
        else:
            self._num_free_cached += 1

    def _forget(self, block_id: int) -> None:
        key = self._keys[block_id]
        if key is not None:
            del self._cached[key]
            self._keys[block_id] = None
            self._adapters[block_id] = ()
