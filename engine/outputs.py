"""What the engine says of a request, one step at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """How a request ended. Every accepted request ends in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities at one position, of the unmodified logits.

    `top` holds (token_id, logprob) of the most likely tokens in falling order, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int  # 1 = the most likely
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """Why a request FAILED, as it crosses the process boundary."""

    code: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """New tokens of one request. `finish_reason` is set exactly once, in the last output.

    `prompt_logprobs` comes whole, once, with the first output: entry 0 is None (nothing predicts the first
    token), so its length is the prompt's.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    new_logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop or end token that ended it, also in new_token_ids
    error: ErrorInfo | None = None
