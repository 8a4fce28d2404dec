"""Puts an engine together: threads -> backend -> model -> memory plan -> slots, KV cache -> scheduler, runner."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.slot_tensors import SlotTensors, slot_bytes
from loraplex.adapters.source import AdapterSource
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore, create_engine_core
from loraplex.engine.core.request_intake import ModelLimits
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.messages import EngineInfo, MemoryPlan
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.loader import load_model, resolve_dtype
from loraplex.engine.runner import memory_plan
from loraplex.engine.runner.activation_memory import measure_peak_activations
from loraplex.engine.runner.device_memory import DeviceMemory, device_memory
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.threads import default_num_threads
from loraplex.kernels.dispatch import create_backend


def build_engine_core(config: EngineConfig, source: AdapterSource) -> tuple[EngineCore, EngineInfo]:
    """Build an engine that is ready for its first request.

    Sets the number of threads that torch computes with in this process.

    Raises:
        ConfigurationError: a setting or the model cannot work; the message names it and what will.
    """
    num_threads = config.num_threads or default_num_threads()
    torch.set_num_threads(num_threads)
    parts = _load(config)
    plan = memory_plan.plan_memory(config, parts.footprint(config), parts.memory)
    slots = SlotTensors.allocate(
        parts.base, num_slots=plan.num_slots, slot_rank=config.slot_rank, dtype=parts.lora_dtype, device=config.device
    )
    adapters = AdapterManager(parts.base, source, slots, host_memory_bytes=plan.adapter_host_memory_bytes)
    model = parts.model
    kv_caches = model.allocate_kv_caches(plan.num_blocks, config.block_size)
    core = create_engine_core(
        config=config,
        num_blocks=plan.num_blocks,
        limits=ModelLimits(
            max_model_len=plan.max_model_len,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        ),
        runner=ModelRunner(model, kv_caches, slots.pools, block_size=config.block_size),
        adapters=adapters,
    )
    weakref.finalize(core, adapters.close)  # the loader threads end with the engine
    return core, _info(config, model, plan, num_threads=num_threads)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What is there before memory is divided."""

    base: BaseSpec
    model: DecoderModel
    memory: DeviceMemory  # before the weights took theirs
    lora_dtype: torch.dtype

    def footprint(self, config: EngineConfig) -> memory_plan.ModelFootprint:
        max_context_len = self.model.config.max_context_len
        return memory_plan.ModelFootprint(
            weights_bytes=self.model.weights_bytes,
            activation_bytes=measure_peak_activations(
                self.model,
                block_size=config.block_size,
                max_num_seqs=config.num_seats,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=min(config.max_model_len or max_context_len, max_context_len),
            ),
            kv_block_bytes=self.model.kv_block_bytes(config.block_size),
            slot_bytes=slot_bytes(self.base, slot_rank=config.slot_rank, dtype=self.lora_dtype),
            max_position_embeddings=max_context_len,
        )


def _load(config: EngineConfig) -> _Parts:
    folder = Path(config.model)
    model_config = ModelConfig.from_folder(folder)
    device = _device(config.device)
    memory = device_memory(device)
    return _Parts(
        base=build_base_spec(folder),
        model=load_model(
            folder,
            model_config,
            backend=create_backend(config.backend, device),
            dtype=resolve_dtype(config.dtype, model_config),
            device=device,
        ),
        memory=memory,
        lora_dtype=torch.float32 if config.lora_dtype == "auto" else resolve_dtype(config.lora_dtype, model_config),
    )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise ConfigurationError(f"the device {name!r} cannot be used: {error}; use cpu", param="device") from error
    return device


def _info(config: EngineConfig, model: DecoderModel, plan: memory_plan.MemoryPlan, *, num_threads: int) -> EngineInfo:
    return EngineInfo(
        backend=model.backend.name,
        device=config.device,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=plan.max_model_len,
        max_num_seqs=config.num_seats,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        num_slots=plan.num_slots,
        slot_rank=config.slot_rank,
        max_lora_rank=plan.max_lora_rank,
        num_threads=num_threads,
        vocab_size=model.config.vocab_size,
        memory=MemoryPlan(
            budget_bytes=plan.weights_bytes + plan.activation_bytes + plan.slots_bytes + plan.kv_cache_bytes,
            weights_bytes=plan.weights_bytes,
            slots_bytes=plan.slots_bytes,
            peak_activation_bytes=plan.activation_bytes,
            kv_cache_bytes=plan.kv_cache_bytes,
        ),
    )
