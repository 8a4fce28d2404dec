"""Gives requests their KV blocks and finds what of a prompt is cached already."""

from __future__ import annotations

from collections.abc import Iterable

from loraplex.engine.core.block_hash import hash_block
from loraplex.engine.core.block_pool import BlockPool
from loraplex.engine.request import Request


class KVCacheManager:
    """Keeps `Request.block_ids`, `block_hashes` and, at admission, `num_computed_tokens`.

    A request takes the blocks of all its known tokens when it is admitted, so a prefill under way never lacks one;
    afterwards it grows by a block whenever a decode crosses a block's end.

        | cached prefix, shared | blocks of its own: the rest of its tokens | next block, taken by a decode
        0                num_computed_tokens                          num_tokens

    Hashing is lazy: blocks are hashed one after the other until the first that is not cached, the others when
    they have been computed.
    """

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.is_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_blocks_used(self) -> int:
        return self._pool.num_used

    @property
    def num_blocks_cached(self) -> int:
        return self._pool.num_free_cached

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_room(self, request: Request) -> list[int] | None:
        """The cached blocks that its tokens begin with, for `admit`; None when the others are not free now."""
        prefix = self._find_prefix(request)
        num_own = self.num_blocks_for(request.num_tokens) - len(prefix)
        num_revived = sum(self._pool.is_free(block_id) for block_id in prefix)
        return prefix if num_own + num_revived <= self._pool.num_free else None

    def admit(self, request: Request, prefix: list[int]) -> None:
        """Share the prefix that `find_room` just found and take the other blocks of all known tokens.

        Sets `num_computed_tokens` to the length of the prefix, which leaves at least the last token to compute.
        """
        assert not request.block_ids
        self._pool.share(prefix)
        num_own = self.num_blocks_for(request.num_tokens) - len(prefix)
        request.block_ids = prefix + self._pool.take(num_own)
        request.num_computed_tokens = len(prefix) * self.block_size

    def grow(self, request: Request) -> bool:
        """Make room for the last token of a running request. False, and nothing changed, when no block is free."""
        missing = self.num_blocks_for(request.num_tokens) - len(request.block_ids)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            request.block_ids += self._pool.take(missing)
        return True

    def publish(self, request: Request, num_tokens_before: int) -> None:
        """Let the blocks be found that were filled since `num_computed_tokens` was `num_tokens_before`."""
        first, end = num_tokens_before // self.block_size, request.num_computed_tokens // self.block_size
        if not self.is_caching or first == end:
            return
        adapters = tuple(ref.digest for ref in request.selection.refs)
        for index in range(first, end):
            self._pool.publish(request.block_ids[index], self._hash(request, index), adapters)

    def free(self, request: Request) -> None:
        """Give the blocks back; what was full and computed stays as cache."""
        self._pool.release(request.block_ids)
        request.block_ids = []
        request.num_computed_tokens = 0

    def discard(self, request: Request) -> None:
        """Give back blocks that hold non-finite values: not cached, and zeroed before reuse."""
        self._pool.mark_dirty(request.block_ids)
        self.free(request)

    def drop_cached(self, adapter_digest: str) -> None:
        """Forget cached prefixes that were computed under the adapter."""
        self._pool.drop_cached(adapter_digest)

    def take_blocks_to_zero(self) -> tuple[int, ...]:
        return self._pool.take_blocks_to_zero()

    def check_integrity(self, requests: Iterable[Request]) -> list[str]:
        """Faults, given all requests that may hold blocks."""
        held = [request for request in requests if request.block_ids]
        faults = self._pool.check_integrity(request.block_ids for request in held)
        faults += [
            f"request {request.request_id} has computed {request.num_computed_tokens} tokens in "
            f"{len(request.block_ids)} blocks"
            for request in held
            if self.num_blocks_for(request.num_computed_tokens) > len(request.block_ids)
        ]
        return faults

    def _find_prefix(self, request: Request) -> list[int]:
        """Cached blocks of the longest known prefix that leaves at least one token to compute."""
        if not self.is_caching or request.wants_prompt_logprobs:
            return []
        prefix: list[int] = []
        for index in range((request.num_tokens - 1) // self.block_size):
            block_id = self._pool.find(self._hash(request, index))
            if block_id is None:
                break
            prefix.append(block_id)
        return prefix

    def _hash(self, request: Request, index: int) -> bytes:
        """Key of a full block whose predecessors have theirs already."""
        hashes = request.block_hashes
        if index == len(hashes):
            start = index * self.block_size
            hashes.append(
                hash_block(
                    parent=hashes[-1] if hashes else None,
                    token_ids=request.token_ids[start : start + self.block_size],
                    selection_digest=request.selection.digest,
                    cache_salt=request.cache_salt,
                )
            )
        return hashes[index]
