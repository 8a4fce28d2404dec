"""From a message to a Request: what can never run is refused here, what was left open is settled here."""

from __future__ import annotations

import math
import re
import secrets
import time
from dataclasses import dataclass

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import LoraSelection
from loraplex.engine.core.block_hash import MAX_SALT_BYTES
from loraplex.engine.errors import ContextLengthError
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.request import Request
from loraplex.engine.sampling_checks import check_sampling_params, check_token_ids
from loraplex.engine.sampling_params import SamplingParams

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """What the model allows a request."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()


class RequestIntake:
    """Turns accepted messages into Requests."""

    def __init__(self, limits: ModelLimits) -> None:
        self._limits = limits

    def accept(self, message: GenerateRequest) -> Request:
        """A WAITING request with `max_tokens` and `seed` resolved.

        A `max_tokens` that is None or goes beyond the context becomes what fits after the prompt.
        Raises InvalidRequestError and ContextLengthError.
        """
        params = message.sampling_params
        self._check_tokens(message.prompt_token_ids, params)
        if len(message.cache_salt) > MAX_SALT_BYTES:
            raise InvalidRequestError(
                f"cache_salt has {len(message.cache_salt)} bytes; at most {MAX_SALT_BYTES} are allowed",
                param="cache_salt",
            )
        selection = _canonical(message.selection)
        arrival_time = time.monotonic()
        return Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=params,
            max_tokens=self._resolve_max_tokens(len(message.prompt_token_ids), params.max_tokens),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            eos_token_ids=self._limits.eos_token_ids,
            selection=selection,
            arrival_time=arrival_time,
            tenant_id=message.tenant_id,
            cache_salt=message.cache_salt,
            priority_class=message.priority_class,
            share=message.share,
            deadline=None if message.deadline_s is None else arrival_time + message.deadline_s,
            prefix_leader_id=message.prefix_leader_id,
        )

    def _check_tokens(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
        check_token_ids("prompt", (min(prompt), max(prompt)), self._limits.vocab_size)
        check_sampling_params(params, self._limits.vocab_size)

    def _resolve_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        max_model_len = self._limits.max_model_len
        room = max_model_len - num_prompt_tokens
        if room < 0 or (room == 0 and max_tokens != 0):
            raise ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens; this model's context holds {max_model_len} tokens, prompt "
                f"and output together: shorten the prompt to at most {max_model_len - 1} tokens",
                param="prompt",
            )
        return room if max_tokens is None else min(max_tokens, room)


def _canonical(selection: LoraSelection) -> LoraSelection:
    """The form that equal selections share, so that they share prefixes too, whatever form they came in."""
    for ref in selection.refs:
        if not _SHA256.fullmatch(ref.digest):
            raise InvalidRequestError(f"{ref.digest!r} is not an adapter's digest (64 hex characters)", param="lora")
    canonical = LoraSelection.of(selection.parts)
    if not all(math.isfinite(part.weight) for part in canonical.parts):
        raise InvalidRequestError("an adapter's weight is not a finite float32 number", param="lora")
    return canonical
