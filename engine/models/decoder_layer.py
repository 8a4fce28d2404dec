"""One decoder layer: a single call. A backend that fuses takes all of them in one (`DecoderModel.fused`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from loraplex.engine.layers.attention import PagedAttention
from loraplex.engine.layers.lora_linear import LoRALinear
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.forward_meta import LayerMeta
from loraplex.kernels.attention.metadata import HeadTransform, KVCache
from loraplex.kernels.dispatch import Backend, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Pre-norm attention and gated MLP. The residual stream is carried beside the hidden states."""

    config: ModelConfig
    backend: Backend
    has_rope: bool
    input_norm: Tensor  # [hidden_size]
    qkv_proj: LoRALinear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    attention: PagedAttention
    o_proj: LoRALinear
    post_attention_norm: Tensor
    gate_up_proj: LoRALinear
    down_proj: LoRALinear

    def forward(
        self, hidden: Tensor, residual: Tensor | None, kv_cache: KVCache, meta: LayerMeta
    ) -> tuple[Tensor, Tensor]:
        """`hidden, residual [T, hidden_size]` -> the same; the layer's output is their sum.

        `residual` is None for the first layer, whose input is `hidden` alone.
        """
        hidden, residual = self._add_norm(hidden, residual, self.input_norm)
        hidden = self._attend(hidden, kv_cache, meta)
        hidden, residual = self._add_norm(hidden, residual, self.post_attention_norm)
        return self._mlp(hidden, meta), residual

    def weights(self) -> LayerWeights:
        """The same for a backend that takes layers whole."""
        return LayerWeights(
            input_norm=self.input_norm,
            qkv=self.qkv_proj.weight,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            o=self.o_proj.weight,
            post_attention_norm=self.post_attention_norm,
            gate_up=self.gate_up_proj.weight,
            down=self.down_proj.weight,
            rms_norm_eps=self.config.rms_norm_eps,
            has_rope=self.has_rope,
            attention_scale=self.attention.scale,
            sliding_window=self.attention.sliding_window,
        )

    def _add_norm(self, hidden: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        eps = self.config.rms_norm_eps
        if residual is None:
            return self.backend.rms_norm(hidden, weight, eps), hidden
        return self.backend.add_rms_norm(hidden, residual, weight, eps)

    def _attend(self, hidden: Tensor, kv_cache: KVCache, meta: LayerMeta) -> Tensor:
        qkv = self.qkv_proj.forward(hidden, meta.lora, meta.pools)
        transform = HeadTransform(
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            eps=self.config.rms_norm_eps,
            cos=meta.cos if self.has_rope else None,
            sin=meta.sin if self.has_rope else None,
        )
        attended = self.attention.forward(qkv, transform, kv_cache, meta.attention)
        return self.o_proj.forward(attended.flatten(1), meta.lora, meta.pools)

    def _mlp(self, hidden: Tensor, meta: LayerMeta) -> Tensor:
        gate_up = self.gate_up_proj.forward(hidden, meta.lora, meta.pools)
        return self.down_proj.forward(self.backend.silu_and_mul(gate_up), meta.lora, meta.pools)
