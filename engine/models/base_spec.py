"""What adapters have to fit, from `config.json` and the weight files' headers."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from loraplex.adapters.base_spec import BaseSpec
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.weight_names import has_bias, projection_shape
from loraplex.kernels.lora.metadata import Projection


def build_base_spec(model_dir: Path) -> BaseSpec:
    """Describe the base without torch and without reading its weights.

    Raises:
        ConfigurationError: the folder is not a supported model.
    """
    config = ModelConfig.from_folder(model_dir)
    shapes = {projection: projection_shape(config, projection) for projection in Projection}
    return BaseSpec(
        digest=_digest(config, Checkpoint.open(model_dir)),
        name=model_dir.resolve().name,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        in_features={projection: shape[1] for projection, shape in shapes.items()},
        out_features={projection: shape[0] for projection, shape in shapes.items()},
        has_bias={projection: has_bias(config, projection) for projection in Projection},
        tie_word_embeddings=config.tie_word_embeddings,
    )


def _digest(config: ModelConfig, checkpoint: Checkpoint) -> str:
    """sha256 over what the configuration means and where each tensor lies; end tokens and spelling do not count."""
    hasher = hashlib.sha256()
    for field in fields(config):
        if field.name != "eos_token_ids":
            hasher.update(f"{field.name}={getattr(config, field.name)!r}\n".encode())
    for name, header in sorted(checkpoint.headers.items()):
        hasher.update(f"{name} {header.dtype} {header.shape} {header.data_offsets}\n".encode())
    for file in checkpoint.files:
        hasher.update(f"{file.name} {file.stat().st_size}\n".encode())
    return hasher.hexdigest()
