"""What adapters have to fit, from `config.json` and the weight files' headers."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from pathlib import Path

from loraplex.adapters.base_spec import BaseSpec
from loraplex.engine.models.base_shapes import base_shapes
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.model_folder import read_model_config


def build_base_spec(model_dir: Path) -> BaseSpec:
    """Describe the base without torch and without reading its weights.

    Raises:
        ConfigurationError: the folder is not a supported model.
    """
    config = read_model_config(model_dir)
    digest = _digest(config, Checkpoint.open(model_dir))
    return base_shapes(config, name=model_dir.resolve().name, digest=digest)


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
