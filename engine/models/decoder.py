"""The one decoder, driven by its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.engine.layers.rotary import RotaryEmbedding
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder_layer import DecoderLayer
from loraplex.engine.models.forward_meta import ForwardMeta, LayerMeta
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.cpu import huge_pages
from loraplex.kernels.dispatch import Backend, LayerStack, PreparedLinear, RowSource


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderModel:
    """Token ids to hidden states to logits. `engine.models.loader.load_model` makes it."""

    config: ModelConfig
    backend: Backend
    embedding: RowSource  # [vocab_size, hidden_size]
    layers: Sequence[DecoderLayer]
    fused: LayerStack | None  # the same layers in one call, where the backend has that
    final_norm: Tensor  # [hidden_size]
    lm_head: PreparedLinear
    rotary: RotaryEmbedding
    weights_bytes: int

    @property
    def dtype(self) -> torch.dtype:
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        return self.final_norm.device

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], meta: ForwardMeta) -> Tensor:
        """Run one flat batch; its keys and values are in `kv_caches` afterwards.

        Args:
            input_ids: int64 [T].
            positions: int64 [T], of each token in its sequence.
            kv_caches: one per layer.

        Returns:
            [T, hidden_size], after the final norm.
        """
        cos, sin = self.rotary.cos_sin(positions, self.dtype)
        layer_meta = LayerMeta(attention=meta.attention, lora=meta.lora, pools=meta.pools, cos=cos, sin=sin)
        hidden, residual = self._run_layers(self.embedding.rows(input_ids), kv_caches, layer_meta)
        return self.backend.add_rms_norm(hidden, residual, self.final_norm, self.config.rms_norm_eps)[0]

    def _run_layers(self, embedded: Tensor, kv_caches: Sequence[KVCache], meta: LayerMeta) -> tuple[Tensor, Tensor]:
        if self.fused is not None:
            output = self.fused.forward(
                embedded,
                kv_caches,
                attention=meta.attention,
                lora=meta.lora,
                pools=meta.pools,
                cos=meta.cos,
                sin=meta.sin,
            )
            if output is not None:
                return output
        hidden, residual = embedded, None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            hidden, residual = layer.forward(hidden, residual, kv_cache, meta)
        assert residual is not None, "a decoder has layers"
        return hidden, residual

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden [L, hidden_size]`, any rows of `forward`'s -> `[L, vocab_size]`, in the model's dtype."""
        return self.backend.linear(hidden, self.lm_head)

    def allocate_kv_caches(self, num_blocks: int, block_size: int) -> list[KVCache]:
        """One cache per layer, not initialised: nothing unwritten is ever used."""
        shape = (num_blocks, block_size, self.config.num_kv_heads, self.config.head_dim)
        return [
            KVCache(
                key=huge_pages.empty(*shape, dtype=self.dtype, device=self.device),
                value=huge_pages.empty(*shape, dtype=self.dtype, device=self.device),
            )
            for _ in self.layers
        ]

    def kv_block_bytes(self, block_size: int) -> int:
        """Bytes of one block in all layers."""
        return 2 * len(self.layers) * block_size * self.config.kv_size * self.dtype.itemsize
