"""Bodies of the replies, whole and in chunks. Every one of them says which adapter versions answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from loraplex.platform.adapters.resolution import ResolvedAdapter

Body = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class TokenCounts:
    """Tokens of one request. The prompt counts once, however many choices it gets."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def to_body(self) -> Body:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What all chunks of one reply share. `model` is as the client addressed it."""

    id: str
    object: str
    model: str
    adapters: tuple[ResolvedAdapter, ...]
    created: int = field(default_factory=lambda: int(time.time()))

    def wrap(self, choices: Sequence[Body], **more: Any) -> Body:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "lora": lora_body(self.adapters),
            "choices": list(choices),
            **more,
        }


def lora_body(adapters: Sequence[ResolvedAdapter]) -> Body | list[Body] | None:
    """null for the base, an object for one adapter, a list for a mix."""
    bodies = [
        {"name": adapter.name, "version": adapter.version, "digest": adapter.digest, "weight": adapter.weight}
        for adapter in adapters
    ]
    if not bodies:
        return None
    return bodies[0] if len(bodies) == 1 else bodies
