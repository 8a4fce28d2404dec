"""Which version holds which slots, in both spaces: leases, pins, victims. Holds no tensors.

A version's slots are given all at once or not at all. Leased and pinned versions are never victims.

Victim choice is least-recently-and-frequently-used (LRFU, Lee et al. 2001) times the cost of a reload: each use adds
1 to a version's heat, which halves every `half_life` uses of the pool; the victim has the least `reload cost * heat`.
Reload cost is the number of slots, to which the bytes read and copied are proportional. Used once each, equal
versions leave in LRU order; a big adapter that is often used stays. Since all heats cool alike, the order of two idle
versions never changes, and one number per version, kept as a logarithm that cannot overflow, is enough.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.adapters.ref import AdapterRef


class Slots(NamedTuple):
    """The slot ids of one version in each space, in the order of its rank rows."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]


@dataclass(slots=True)
class _Holder:
    ref: AdapterRef
    slots: Slots
    leases: int = 0
    heat: float = 0.0  # log2 of the cooled number of uses as of `last_use`; the admission is one
    last_use: int = 0


class Admission(NamedTuple):
    """What an `admit` changed."""

    admitted: tuple[str, ...]  # digests that got slots now and need their weights
    evicted: tuple[str, ...]  # digests that lost theirs


class SlotPool:
    def __init__(self, num_slots: int, *, half_life: int = 64) -> None:
        assert num_slots >= 1
        self.num_slots = num_slots
        self._half_life = half_life
        self._free_attention = list(range(num_slots - 1, -1, -1))
        self._free_mlp = list(range(num_slots - 1, -1, -1))
        self._holders: dict[str, _Holder] = {}
        self._pinned: dict[str, AdapterRef] = {}
        self._num_uses = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._holders

    def __iter__(self) -> Iterator[AdapterRef]:
        return iter([holder.ref for holder in self._holders.values()])

    def slots(self, digest: str) -> Slots:
        return self._holders[digest].slots

    def leases(self, digest: str) -> int:
        holder = self._holders.get(digest)
        return 0 if holder is None else holder.leases

    @property
    def num_leases(self) -> int:
        return sum(holder.leases for holder in self._holders.values())

    @property
    def num_attention_slots_used(self) -> int:
        return self.num_slots - len(self._free_attention)

    @property
    def num_mlp_slots_used(self) -> int:
        return self.num_slots - len(self._free_mlp)

    def admit(self, refs: Iterable[AdapterRef], *, spared: Collection[str] = ()) -> Admission | None:
        """Give every ref its slots in both spaces, evicting victims (never the `spared`) as needed.

        None, and nothing changed, if that is impossible. The slots are not leased yet.
        """
        wanted = {ref.digest: ref for ref in refs}
        missing = [ref for digest, ref in wanted.items() if digest not in self._holders]
        num_attention = sum(ref.num_attention_slots for ref in missing) - len(self._free_attention)
        num_mlp = sum(ref.num_mlp_slots for ref in missing) - len(self._free_mlp)
        victims = self._choose_victims(num_attention, num_mlp, spared={*wanted, *spared})
        if victims is None:
            return None
        for digest in victims:
            self.free(digest)
        for ref in missing:
            self._allocate(ref)
        return Admission(tuple(ref.digest for ref in missing), tuple(victims))

    def lease(self, digest: str) -> None:
        """One more user; the version must hold slots."""
        holder = self._holders[digest]
        holder.leases += 1
        age = self._num_uses - holder.last_use
        holder.heat = math.log2(1.0 + 2.0 ** (holder.heat - age / self._half_life))
        self._num_uses += 1
        holder.last_use = self._num_uses

    def unlease(self, digest: str) -> None:
        holder = self._holders[digest]
        assert holder.leases > 0, f"{digest} has no lease to give back"
        holder.leases -= 1

    def pin(self, ref: AdapterRef) -> None:
        """Never a victim, from now or from its next admission on."""
        self._pinned[ref.digest] = ref

    def unpin(self, digest: str) -> None:
        self._pinned.pop(digest, None)

    def is_pinned(self, digest: str) -> bool:
        return digest in self._pinned

    @property
    def pinned(self) -> Collection[AdapterRef]:
        return self._pinned.values()

    def free(self, digest: str) -> None:
        """Take the slots back from a version without leases."""
        holder = self._holders.pop(digest)
        assert holder.leases == 0, f"{digest} is leased"
        self._free_attention.extend(reversed(holder.slots.attention))
        self._free_mlp.extend(reversed(holder.slots.mlp))

    def check_integrity(self) -> list[str]:
        """Every slot has one owner, no lease is negative; a fault per violation."""
        faults = []
        owned_attention = [slot for holder in self._holders.values() for slot in holder.slots.attention]
        owned_mlp = [slot for holder in self._holders.values() for slot in holder.slots.mlp]
        for space, owned in (
            ("attention", owned_attention + self._free_attention),
            ("MLP", owned_mlp + self._free_mlp),
        ):
            counts = Counter(owned)
            faults += [f"{space} slot {slot} has {num} owners" for slot, num in counts.items() if num > 1]
            lost = set(range(self.num_slots)) - counts.keys()
            faults += [f"{space} slot {slot} is lost" for slot in sorted(lost)]
        for digest, holder in self._holders.items():
            expected = (holder.ref.num_attention_slots, holder.ref.num_mlp_slots)
            if (len(holder.slots.attention), len(holder.slots.mlp)) != expected:
                faults.append(f"{digest} does not hold the slots it needs")
            if holder.leases < 0:
                faults.append(f"{digest} has {holder.leases} leases")
        return faults

    def _choose_victims(self, num_attention: int, num_mlp: int, *, spared: Collection[str]) -> list[str] | None:
        """The coldest versions that together free so many slots, without any that is not needed for it."""
        victims: list[_Holder] = []
        for holder in self._evictable(spared):
            if num_attention <= 0 and num_mlp <= 0:
                break
            slots = holder.slots
            if (num_attention > 0 and slots.attention) or (num_mlp > 0 and slots.mlp):
                victims.append(holder)
                num_attention -= len(slots.attention)
                num_mlp -= len(slots.mlp)
        if num_attention > 0 or num_mlp > 0:
            return None
        return [holder.ref.digest for holder in _without_needless(victims, -num_attention, -num_mlp)]

    def _evictable(self, spared: Collection[str]) -> list[_Holder]:
        idle = [
            holder
            for digest, holder in self._holders.items()
            if holder.leases == 0 and digest not in self._pinned and digest not in spared
        ]
        return sorted(idle, key=self._retention)

    def _retention(self, holder: _Holder) -> float:
        """log2(reload cost * heat), moved to one common moment: idle versions keep their order."""
        cost = holder.ref.num_attention_slots + holder.ref.num_mlp_slots
        return math.log2(max(cost, 1)) + holder.heat + holder.last_use / self._half_life

    def _allocate(self, ref: AdapterRef) -> None:
        slots = Slots(
            tuple(self._free_attention.pop() for _ in range(ref.num_attention_slots)),
            tuple(self._free_mlp.pop() for _ in range(ref.num_mlp_slots)),
        )
        self._holders[ref.digest] = _Holder(ref, slots, last_use=self._num_uses)


def _without_needless(victims: list[_Holder], spare_attention: int, spare_mlp: int) -> list[_Holder]:
    """Spare the warmest victims first whose slots a later, bigger victim made superfluous."""
    needed = []
    for holder in reversed(victims):
        num_attention, num_mlp = len(holder.slots.attention), len(holder.slots.mlp)
        if num_attention <= spare_attention and num_mlp <= spare_mlp:
            spare_attention -= num_attention
            spare_mlp -= num_mlp
        else:
            needed.append(holder)
    return needed[::-1]
