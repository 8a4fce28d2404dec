"""How one request wants its tokens chosen and when to stop."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loraplex.adapters.errors import InvalidRequestError

MAX_LOGPROBS = 20
MAX_CHOICES = 128

_RANGES: dict[str, tuple[float, float]] = {
    "max_tokens": (0, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "temperature": (0.0, 100.0),
    "top_k": (0, 1 << 31),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "n": (1, MAX_CHOICES),
    "seed": (-(1 << 63), (1 << 63) - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with OpenAI's and vLLM's names and meanings.

    `stop` strings are found by the frontend (they may span tokens); everything else acts in the engine.
    `logprobs` / `prompt_logprobs`: None = none, k = the token's own plus the k most likely. `max_tokens=None`
    means up to `max_model_len`. `seed=None` means a random seed per request.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:  # also catches NaN
                raise InvalidRequestError(f"{name} is {value}; it must lie between {low} and {high}", param=name)
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", param="top_p")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise InvalidRequestError("repetition_penalty must be a finite number above 0", param="repetition_penalty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is above max_tokens ({self.max_tokens})", param="min_tokens"
            )
        if not all(-100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise InvalidRequestError("logit_bias values must lie between -100 and 100", param="logit_bias")
        if not all(self.stop):
            raise InvalidRequestError("stop strings must not be empty", param="stop")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0
