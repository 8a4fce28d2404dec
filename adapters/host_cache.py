"""Weights of versions in host memory, bounded in bytes. Least recently used leaves first; referenced never leaves."""

from __future__ import annotations

from collections import Counter, OrderedDict

from loraplex.adapters.weights import AdapterWeights


class HostCache:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._weights: OrderedDict[str, AdapterWeights] = OrderedDict()  # least recently used first
        self._references: Counter[str] = Counter()

    def __contains__(self, digest: str) -> bool:
        return digest in self._weights

    def get(self, digest: str) -> AdapterWeights | None:
        weights = self._weights.get(digest)
        if weights is not None:
            self._weights.move_to_end(digest)
        return weights

    def put(self, digest: str, weights: AdapterWeights) -> bool:
        """Keep `weights` if that is possible within the bound; False (and nothing changed) if it is not."""
        assert digest not in self._weights
        victims, num_free = [], self.max_bytes - self.num_bytes
        for candidate, held in self._weights.items():
            if num_free >= weights.num_bytes:
                break
            if not self._references[candidate]:
                victims.append(candidate)
                num_free += held.num_bytes
        if num_free < weights.num_bytes:
            return False
        for victim in victims:
            self.remove(victim)
        self._weights[digest] = weights
        self.num_bytes += weights.num_bytes
        return True

    def remove(self, digest: str) -> None:
        """Forget a copy; nothing happens when there is none."""
        weights = self._weights.pop(digest, None)
        if weights is not None:
            self.num_bytes -= weights.num_bytes

    def add_reference(self, digest: str) -> None:
        """From now on the copy stays, also one that comes later."""
        self._references[digest] += 1

    def drop_reference(self, digest: str) -> None:
        assert self._references[digest] > 0, f"{digest} has no reference to drop"
        self._references[digest] -= 1
        if not self._references[digest]:
            del self._references[digest]

    def references(self, digest: str) -> int:
        return self._references.get(digest, 0)

    @property
    def num_references(self) -> int:
        return self._references.total()

    def check_integrity(self) -> list[str]:
        faults = []
        held = sum(weights.num_bytes for weights in self._weights.values())
        if held != self.num_bytes:
            faults.append(f"the host cache counts {self.num_bytes} bytes and holds {held}")
        if held > self.max_bytes:
            faults.append(f"the host cache holds {held} bytes of {self.max_bytes}")
        return faults
