"""The dtype that a setting means for a model."""

from __future__ import annotations

import torch

from loraplex.engine.config import DType
from loraplex.engine.models.config import ModelConfig


def resolve_dtype(dtype: DType, config: ModelConfig) -> torch.dtype:
    """`auto` = what the checkpoint is stored in."""
    name = config.dtype if dtype == "auto" else dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
