"""Puts a decoder together from weights that each pass once through the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from loraplex.engine.layers.attention import PagedAttention
from loraplex.engine.layers.embedding import EmbeddingTable
from loraplex.engine.layers.lora_linear import LoRALinear
from loraplex.engine.layers.rotary import RotaryEmbedding
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.decoder_layer import DecoderLayer
from loraplex.engine.models.weight_names import EMBEDDING, FINAL_NORM, LM_HEAD, has_bias, layer_prefix, module_path
from loraplex.kernels.dispatch import Backend, FusingBackend, PreparedLinear, RowSource
from loraplex.kernels.lora.metadata import Projection

_QKV = (Projection.Q, Projection.K, Projection.V)
_GATE_UP = (Projection.GATE, Projection.UP)


class WeightReader(Protocol):
    """Where the weights come from, by Hugging Face's names; every tensor is asked for once and not shared."""

    @property
    def device(self) -> torch.device: ...

    def read(self, name: str) -> Tensor:
        """In the serving dtype, on the device."""
        ...

    def read_fused(self, names: Sequence[str]) -> Tensor:
        """The tensors one after another along the first dimension."""
        ...


def build_decoder(config: ModelConfig, backend: Backend, weights: WeightReader) -> DecoderModel:
    return _DecoderBuilder(config, backend, weights).build()


class _DecoderBuilder:
    """Puts layers together and counts the bytes that stay."""

    def __init__(self, config: ModelConfig, backend: Backend, weights: WeightReader) -> None:
        self.config = config
        self.backend = backend
        self.weights = weights
        self.weights_bytes = 0

    def build(self) -> DecoderModel:
        config = self.config
        embedding, lm_head = self._embedding_and_head()
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        final_norm = self._tensor(FINAL_NORM)
        return DecoderModel(
            config=config,
            backend=self.backend,
            embedding=embedding,
            layers=layers,
            fused=(
                self.backend.fuse_layers([layer.weights() for layer in layers])
                if isinstance(self.backend, FusingBackend)
                else None
            ),
            final_norm=final_norm,
            lm_head=lm_head,
            rotary=RotaryEmbedding(config.rope, config.head_dim, self.weights.device),
            weights_bytes=self.weights_bytes,
        )

    def _embedding_and_head(self) -> tuple[RowSource, PreparedLinear]:
        """Tied, they are one weight, unless the backend's layout gives no rows back."""
        if not self.config.tie_word_embeddings:
            return EmbeddingTable(weight=self._tensor(EMBEDDING)), self._prepare(self.weights.read(LM_HEAD), None)
        weight = self.weights.read(EMBEDDING)
        head = self._prepare(weight, None)
        if isinstance(head, RowSource):
            return head, head
        self.weights_bytes += weight.nbytes
        return EmbeddingTable(weight=weight), head

    def _layer(self, layer: int) -> DecoderLayer:
        config, prefix = self.config, layer_prefix(layer)
        return DecoderLayer(
            config=config,
            backend=self.backend,
            has_rope=config.rope_layers[layer],
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight"),
            qkv_proj=self._linear(layer, _QKV),
            q_norm=self._tensor(f"{prefix}.self_attn.q_norm.weight") if config.has_qk_norm else None,
            k_norm=self._tensor(f"{prefix}.self_attn.k_norm.weight") if config.has_qk_norm else None,
            attention=PagedAttention(
                backend=self.backend, scale=config.head_dim**-0.5, sliding_window=config.sliding_windows[layer]
            ),
            o_proj=self._linear(layer, (Projection.O,)),
            post_attention_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up_proj=self._linear(layer, _GATE_UP),
            down_proj=self._linear(layer, (Projection.DOWN,)),
        )

    def _linear(self, layer: int, projections: Sequence[Projection]) -> LoRALinear:
        paths = [module_path(layer, projection) for projection in projections]
        weight = self.weights.read_fused([f"{path}.weight" for path in paths])
        bias = None
        if has_bias(self.config, projections[0]):
            bias = self.weights.read_fused([f"{path}.bias" for path in paths])
        return LoRALinear(
            backend=self.backend, weight=self._prepare(weight, bias), layer=layer, projections=projections
        )

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        prepared = self.backend.prepare_linear(weight, bias)
        self.weights_bytes += prepared.nbytes
        return prepared

    def _tensor(self, name: str) -> Tensor:
        tensor = self.weights.read(name)
        self.weights_bytes += tensor.nbytes
        return tensor
