"""Rotary position embedding as `config.json` spells it, in the old way and the new."""

from __future__ import annotations

import math
from dataclasses import dataclass

from loraplex.engine.errors import ConfigurationError

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Resolved parameters; those that a type does not have keep their neutral value."""

    rope_type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0  # cos and sin are multiplied by it

    @property
    def stretched_max_position_embeddings(self) -> float:
        """Where positions end that `factor` spread over more tokens; 0 for a type whose context is not so stated."""
        return self.factor * self.original_max_position_embeddings if self.rope_type in ("linear", "yarn") else 0


@dataclass(slots=True, kw_only=True)
class RopeParameters:
    """`rope_parameters` (new) or `rope_scaling` (old, with `type` and without `rope_theta`) as written."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    full_attention: object = None  # parameters nested by layer type, which none of the supported families writes
    sliding_attention: object = None


def resolve_rope(
    given: RopeParameters,
    *,
    theta: float,
    max_position_embeddings: int,
    original_max_position_embeddings: int | None,
) -> RopeConfig:
    """Check what is given and fill in what transformers would; the keyword arguments are `config.json`'s own fields.

    Raises:
        ConfigurationError: a type or a feature that is not supported, or a parameter that the type needs.
    """
    rope_type = given.rope_type or given.type or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ConfigurationError(_refusal(rope_type), param="model")
    if given.partial_rotary_factor not in (None, 1.0):
        raise ConfigurationError(
            f"config.json: partial_rotary_factor is {given.partial_rotary_factor}; only whole heads (1.0) are rotated",
            param="model",
        )
    if given.full_attention is not None or given.sliding_attention is not None:
        raise ConfigurationError("config.json: rope_parameters per layer type are not supported", param="model")
    theta = given.rope_theta if given.rope_theta is not None else theta
    if not theta > 1:
        raise ConfigurationError(f"config.json: rope_theta is {theta}; it must be above 1", param="model")
    original = original_max_position_embeddings or given.original_max_position_embeddings or max_position_embeddings
    match rope_type:
        case "linear":
            return RopeConfig(
                rope_type=rope_type,
                theta=theta,
                factor=_factor(given, rope_type),
                original_max_position_embeddings=original,
            )
        case "llama3":
            return _llama3(given, theta, original)
        case "yarn":
            return _yarn(given, theta, original)
        case _:
            return RopeConfig(theta=theta)


def _refusal(rope_type: str) -> str:
    message = f"config.json: rope type {rope_type!r} is not supported; supported are {', '.join(SUPPORTED_ROPE_TYPES)}"
    if rope_type == "dynamic":
        message += (
            ". Its frequencies depend on the final length of a sequence, so that keys in the cache would be stale; "
            "remove rope_scaling to serve up to max_position_embeddings, or use yarn"
        )
    return message


def _llama3(given: RopeParameters, theta: float, original: int) -> RopeConfig:
    low, high = given.low_freq_factor, given.high_freq_factor
    if low is None or high is None or not 0 < low < high:
        raise ConfigurationError(
            f"config.json: rope type 'llama3' needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}",
            param="model",
        )
    return RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=_factor(given, "llama3"),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(given: RopeParameters, theta: float, original: int) -> RopeConfig:
    factor = _factor(given, "yarn")
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=given.beta_fast or 32.0,
        beta_slow=given.beta_slow or 1.0,
        truncate=given.truncate,
        attention_factor=_yarn_attention_factor(given, factor),
    )


def _yarn_attention_factor(given: RopeParameters, factor: float) -> float:
    """YaRN (arXiv:2309.00071) section 3.4; `mscale` and `mscale_all_dim` are DeepSeek's extension of it."""
    if given.attention_factor is not None:
        return given.attention_factor
    if given.mscale and given.mscale_all_dim:
        return _attention_temperature(factor, given.mscale) / _attention_temperature(factor, given.mscale_all_dim)
    return _attention_temperature(factor, 1.0)


def _attention_temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _factor(given: RopeParameters, rope_type: str) -> float:
    if given.factor is None or given.factor < 1:
        raise ConfigurationError(
            f"config.json: rope type {rope_type!r} needs a factor of at least 1, got {given.factor}", param="model"
        )
    return given.factor
