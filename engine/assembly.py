"""Puts an engine together from a model in memory: memory plan -> slots, KV cache -> scheduler, runner."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.host_loader import AdapterReader
from loraplex.adapters.manager import AdapterManager
from loraplex.adapters.slot_tensors import SlotTensors, slot_bytes
from loraplex.engine.config import EngineConfig
from loraplex.engine.core.engine_core import EngineCore, create_engine_core
from loraplex.engine.core.request_intake import ModelLimits
from loraplex.engine.messages import EngineInfo, MemoryPlan
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.dtypes import resolve_dtype
from loraplex.engine.runner import memory_plan
from loraplex.engine.runner.activation_memory import measure_graph_memory, measure_peak_activations
from loraplex.engine.runner.cuda_graph import CudaGraphRecorder
from loraplex.engine.runner.decode_graphs import DecodeGraphs
from loraplex.engine.runner.device_memory import DeviceMemory
from loraplex.engine.runner.model_runner import ModelRunner
from loraplex.engine.runner.warm_up import warm_up
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.lora.metadata import LoRAPools

logger = logging.getLogger(__name__)

_RECORDING_BUDGET_S = 10.0  # of the start; what is not recorded by then is when it is first met


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What is there before memory is divided."""

    base: BaseSpec
    model: DecoderModel
    memory: DeviceMemory  # before the weights took theirs


def assemble_engine_core(
    config: EngineConfig, parts: EngineParts, reader: AdapterReader
) -> tuple[EngineCore, EngineInfo]:
    """An engine that is ready for its first request; `config.model` plays no part.

    Raises:
        ConfigurationError: a setting cannot work; the message names it and what will.
    """
    model, lora_dtype = parts.model, lora_dtype_of(config, parts.model)
    plan = memory_plan.plan_memory(config, _footprint(config, parts, lora_dtype), parts.memory)
    slots = SlotTensors.allocate(
        parts.base, num_slots=plan.num_slots, slot_rank=config.slot_rank, dtype=lora_dtype, device=config.device
    )
    adapters = AdapterManager(reader, slots, host_memory_bytes=plan.adapter_host_memory_bytes)
    runner = _create_runner(config, plan, model, slots.pools)
    core = create_engine_core(
        config=config,
        num_blocks=plan.num_blocks,
        limits=ModelLimits(
            max_model_len=plan.max_model_len,
            vocab_size=model.config.vocab_size,
            eos_token_ids=model.config.eos_token_ids,
        ),
        runner=runner,
        adapters=adapters,
    )
    weakref.finalize(core, adapters.close)  # the loader threads end with the engine
    return core, _info(config, model, plan)


def _create_runner(
    config: EngineConfig, plan: memory_plan.MemoryPlan, model: DecoderModel, pools: LoRAPools
) -> ModelRunner:
    """On a GPU with every kernel compiled, and the usual decode steps recorded, before the first request."""
    kv_caches = model.allocate_kv_caches(plan.num_blocks, config.block_size)
    if model.device.type != "cuda":
        return ModelRunner(model, kv_caches, pools, block_size=config.block_size)
    start = time.monotonic()
    graphs = _record_graphs(config, plan, model, kv_caches, pools) if _has_graphs(config, model) else None
    runner = ModelRunner(model, kv_caches, pools, block_size=config.block_size, graphs=graphs)
    warm_up(
        runner,
        block_size=config.block_size,
        num_blocks=plan.num_blocks,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    torch.cuda.synchronize(model.device)
    logger.info("kernels compiled and decode steps recorded in %.1f s", time.monotonic() - start)
    return runner


def _record_graphs(
    config: EngineConfig,
    plan: memory_plan.MemoryPlan,
    model: DecoderModel,
    kv_caches: Sequence[KVCache],
    pools: LoRAPools,
) -> DecodeGraphs:
    graphs = DecodeGraphs(
        model,
        kv_caches,
        pools,
        CudaGraphRecorder(model.device),
        max_num_seqs=config.num_seats,
        max_model_len=plan.max_model_len,
        block_size=config.block_size,
    )
    graphs.record_common(budget_s=_RECORDING_BUDGET_S)
    return graphs


def _has_graphs(config: EngineConfig, model: DecoderModel) -> bool:
    """Only the triton backend computes a decode step without asking the host."""
    return model.device.type == "cuda" and model.backend.name == "triton" and not config.enforce_eager


def lora_dtype_of(config: EngineConfig, model: DecoderModel) -> torch.dtype:
    """What the slots hold A and B in."""
    return torch.float32 if config.lora_dtype == "auto" else resolve_dtype(config.lora_dtype, model.config)


def _footprint(config: EngineConfig, parts: EngineParts, lora_dtype: torch.dtype) -> memory_plan.ModelFootprint:
    model = parts.model
    return memory_plan.ModelFootprint(
        weights_bytes=model.weights_bytes,
        activation_bytes=_activation_bytes(config, model),
        kv_block_bytes=model.kv_block_bytes(config.block_size),
        slot_bytes=slot_bytes(parts.base, slot_rank=config.slot_rank, dtype=lora_dtype),
        max_position_embeddings=model.config.max_context_len,
    )


def _activation_bytes(config: EngineConfig, model: DecoderModel) -> int:
    reach = model.config.max_context_len
    max_model_len = min(config.max_model_len or reach, reach)
    peak = measure_peak_activations(
        model,
        block_size=config.block_size,
        max_num_seqs=config.num_seats,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    if not _has_graphs(config, model):
        return peak
    return peak + measure_graph_memory(
        model, block_size=config.block_size, max_num_seqs=config.num_seats, max_model_len=max_model_len
    )


def _info(config: EngineConfig, model: DecoderModel, plan: memory_plan.MemoryPlan) -> EngineInfo:
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
        num_threads=torch.get_num_threads(),
        vocab_size=model.config.vocab_size,
        memory=MemoryPlan(
            budget_bytes=plan.weights_bytes + plan.activation_bytes + plan.slots_bytes + plan.kv_cache_bytes,
            weights_bytes=plan.weights_bytes,
            slots_bytes=plan.slots_bytes,
            peak_activation_bytes=plan.activation_bytes,
            kv_cache_bytes=plan.kv_cache_bytes,
        ),
    )
