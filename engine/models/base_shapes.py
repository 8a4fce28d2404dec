"""What adapters have to fit, from what the decoder is."""

from __future__ import annotations

from loraplex.adapters.base_spec import BaseSpec
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.weight_names import has_bias, projection_shape
from loraplex.kernels.lora.metadata import Projection


def base_shapes(config: ModelConfig, *, name: str, digest: str) -> BaseSpec:
    """`name` is how messages call the base, `digest` (sha256, hex) what identifies it."""
    shapes = {projection: projection_shape(config, projection) for projection in Projection}
    return BaseSpec(
        digest=digest,
        name=name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        in_features={projection: shape[1] for projection, shape in shapes.items()},
        out_features={projection: shape[0] for projection, shape in shapes.items()},
        has_bias={projection: has_bias(config, projection) for projection in Projection},
        tie_word_embeddings=config.tie_word_embeddings,
    )
