"""What a decoder is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex.engine.models.rope_config import RopeConfig

ModelDType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the supported families; the model's code asks only this, never the family's name."""

    model_type: str
    dtype: ModelDType  # of the checkpoint, as config.json says; float32 when it does not
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    rope_layers: tuple[bool, ...]  # per layer: are q and k rotated
    sliding_windows: tuple[int | None, ...]  # per layer: keys that a query sees, itself included; None = all
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context_len(self) -> int:
        """Tokens that the position embeddings were made for.

        `max_position_embeddings` of a file with yarn or linear scaling may be the length before or after it.
        """
        return max(self.max_position_embeddings, int(self.rope.stretched_max_position_embeddings))
