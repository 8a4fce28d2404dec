"""Rotary position embedding: the frequencies of each type, and cos and sin of a step's positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraplex.engine.models.rope_config import RopeConfig


class RotaryEmbedding:
    """Holds the inverse frequencies; computes in float32, as transformers does."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)  # float32 [head_dim / 2]
        self.attention_factor = rope.attention_factor

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions int64 [T]` -> cos and sin, each `[T, head_dim]`."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return (angles.cos() * self.attention_factor).to(dtype), (angles.sin() * self.attention_factor).to(dtype)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 `[head_dim / 2]`."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelength = rope.theta**exponent  # in radians; one turn takes 2 pi times as many positions
    match rope.rope_type:
        case "default":
            return 1.0 / wavelength
        case "linear":
            return 1.0 / wavelength / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / wavelength)
        case "yarn":
            return _yarn(rope, wavelength, head_dim)
        case _:
            raise ValueError(f"rope type {rope.rope_type!r}")


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Llama 3.1: stretch the low frequencies by `factor`, keep the high ones, blend linearly between."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(kept.clamp(0, 1), inv_freq, inv_freq / rope.factor)


def _yarn(rope: RopeConfig, wavelength: Tensor, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071): as llama3, with a ramp over the dimensions between two numbers of turns."""

    def dimension(turns: float) -> float:
        """The (fractional) dimension that makes so many turns within the original context."""
        return (
            head_dim
            * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return _blend(1 - stretched, 1.0 / wavelength, 1.0 / (rope.factor * wavelength))


def _blend(share: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return share * first + (1 - share) * second
