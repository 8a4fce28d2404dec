"""Puts the logprobs of a prompt together from the chunks in which it is computed."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.outputs import TokenLogprobs
from loraplex.engine.request import Request


class PromptLogprobs:
    """What is known of each prompt until it is delivered with the request's first output; outlives preemption."""

    def __init__(self) -> None:
        self._entries: dict[str, list[TokenLogprobs]] = {}

    def collect(self, request: Request, first_position: int, entries: Sequence[TokenLogprobs]) -> None:
        """`entries[i]` belongs to the prompt token at `first_position + i + 1`; what is known already is skipped."""
        if not request.wants_prompt_logprobs or request.num_output_tokens > 0:
            return
        known = self._entries.setdefault(request.request_id, [])
        known.extend(entries[max(0, len(known) - first_position) :])

    def take(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        """The whole prompt's, once; None for its first token, which nothing predicts."""
        entries = self._entries.pop(request.request_id, None)
        return None if entries is None else (None, *entries)

    def drop(self, request: Request) -> None:
        self._entries.pop(request.request_id, None)

    def __len__(self) -> int:
        return len(self._entries)
