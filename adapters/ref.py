"""Who a request runs through: immutable identities of adapter versions, and the selection made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """Immutable identity of one adapter version.

    `digest` is the sha256 (64 hex characters) over the sorted (file name, sha256) list of the version's files;
    the counts say how many slots its ranks take in each slot space. Tenant, name and version number belong to
    the platform: slots, loads and caches key on the digest alone.
    """

    digest: str
    num_attention_slots: int
    num_mlp_slots: int


@dataclass(frozen=True, slots=True)
class SelectionPart:
    """One adapter of a selection with its mix weight (float32 semantics, 1.0 = as trained)."""

    ref: AdapterRef
    weight: float = 1.0


@dataclass(frozen=True)  # no slots: `digest` is kept in the instance
class LoraSelection:
    """What one request runs through: nothing (the base), one adapter version, or a weighted mix.

    Build it with `of`, which brings it into the one form that equal selections share: weights rounded to
    float32, parts of one digest added, zero weights dropped, sorted by digest.
    """

    parts: tuple[SelectionPart, ...] = ()

    @classmethod
    def of(cls, parts: Iterable[SelectionPart]) -> LoraSelection:
        refs: dict[str, AdapterRef] = {}
        weights: dict[str, np.float32] = {}
        for part in parts:
            refs[part.ref.digest] = part.ref
            weights[part.ref.digest] = weights.get(part.ref.digest, np.float32(0)) + np.float32(part.weight)
        return cls(
            tuple(
                SelectionPart(refs[digest], float(weights[digest])) for digest in sorted(refs) if weights[digest] != 0
            )
        )

    @classmethod
    def single(cls, ref: AdapterRef) -> LoraSelection:
        return cls((SelectionPart(ref),))

    @property
    def is_base(self) -> bool:
        return not self.parts

    @cached_property
    def digest(self) -> bytes:
        """sha256 over the (digest, float32 weight) pairs; empty for the base."""
        if not self.parts:
            return b""
        hasher = hashlib.sha256()
        for part in self.parts:
            hasher.update(bytes.fromhex(part.ref.digest))
            hasher.update(np.float32(part.weight).tobytes())
        return hasher.digest()

    @property
    def refs(self) -> tuple[AdapterRef, ...]:
        return tuple(part.ref for part in self.parts)

    @property
    def num_attention_slots(self) -> int:
        return sum(part.ref.num_attention_slots for part in self.parts)

    @property
    def num_mlp_slots(self) -> int:
        return sum(part.ref.num_mlp_slots for part in self.parts)


BASE = LoraSelection()
