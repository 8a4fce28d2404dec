"""Choices of one parent (n > 1): all but the first wait until the first has cached the prompt that they share."""

from __future__ import annotations

from collections.abc import Iterator

from loraplex.engine.request import Request


class PrefixFollowers:
    """Accepted requests that are in no queue yet, by the request that they wait for."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, Request]] = {}

    def hold(self, request: Request, leader: Request) -> None:
        self._held.setdefault(leader.request_id, {})[request.request_id] = request

    def remove(self, request: Request) -> None:
        """It ended before its leader let it go."""
        leader_id = request.prefix_leader_id or ""
        followers = self._held[leader_id]
        del followers[request.request_id]
        if not followers:
            del self._held[leader_id]

    def release(self, leader: Request) -> list[Request]:
        """Those who need not wait any longer, in the order of arrival."""
        return list(self._held.pop(leader.request_id, {}).values())

    def has_any(self, leader: Request) -> bool:
        return leader.request_id in self._held

    def is_held(self, request: Request) -> bool:
        return request.request_id in self._held.get(request.prefix_leader_id or "", {})

    def __iter__(self) -> Iterator[Request]:
        return (request for followers in self._held.values() for request in followers.values())

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))
