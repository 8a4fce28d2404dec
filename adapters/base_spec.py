"""The shapes of the base model that an adapter has to fit, known from `config.json` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from loraplex.kernels.lora.metadata import Projection


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSpec:
    """One linear layer of the base that an adapter may target."""

    path: str  # e.g. "model.layers.0.self_attn.q_proj"
    layer: int
    projection: Projection
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSpec:
    """What the validator, the slot tensors and the doctor need to know of the base. Built by `engine.models`."""

    digest: str  # sha256 (hex) of what identifies the base
    name: str  # how messages call it
    num_layers: int
    hidden_size: int
    vocab_size: int
    in_features: Mapping[Projection, int]
    out_features: Mapping[Projection, int]
    has_bias: Mapping[Projection, bool]
    tie_word_embeddings: bool

    def modules(self) -> Iterator[ModuleSpec]:
        for layer in range(self.num_layers):
            for projection in Projection:
                yield self.module(layer, projection)

    def module(self, layer: int, projection: Projection) -> ModuleSpec:
        block = "self_attn" if projection.is_attention else "mlp"
        return ModuleSpec(
            path=f"model.layers.{layer}.{block}.{projection.module_name}",
            layer=layer,
            projection=projection,
            in_features=self.in_features[projection],
            out_features=self.out_features[projection],
        )
