"""Builds an engine from a model's folder: threads -> device, backend -> weights -> the rest of `engine.assembly`."""

from __future__ import annotations

from pathlib import Path

import torch

from loraplex.adapters.folder_reader import FolderReader
from loraplex.adapters.source import AdapterSource
from loraplex.engine.assembly import EngineParts, assemble_engine_core, lora_dtype_of
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.messages import EngineInfo
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.dtypes import resolve_dtype
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.runner.device_memory import device_memory
from loraplex.engine.threads import default_num_threads
from loraplex.kernels.dispatch import Backend, create_backend


def build_engine_core(config: EngineConfig, source: AdapterSource) -> tuple[EngineCore, EngineInfo]:
    """Build an engine that is ready for its first request.

    Sets the number of threads that torch computes with in this process.

    Raises:
        ConfigurationError: a setting or the model cannot work; the message names it and what will.
    """
    torch.set_num_threads(config.num_threads or default_num_threads())
    parts = _load(config)
    reader = FolderReader(parts.base, source, slot_dtype=lora_dtype_of(config, parts.model))
    return assemble_engine_core(config, parts, reader)


def _load(config: EngineConfig) -> EngineParts:
    folder = Path(config.model)
    model_config = read_model_config(folder)
    device = _device(config.device)
    memory = device_memory(device)
    return EngineParts(
        base=build_base_spec(folder),
        model=load_model(
            folder,
            model_config,
            backend=_backend(config.backend, device),
            dtype=resolve_dtype(config.dtype, model_config),
            device=device,
        ),
        memory=memory,
    )


def _backend(name: str, device: torch.device) -> Backend:
    try:
        return create_backend(name, device)
    except ValueError as error:
        raise ConfigurationError(str(error), param="backend") from error


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigurationError(f"the device {name!r} cannot be used: {error}; use cpu", param="device") from error
    return device
