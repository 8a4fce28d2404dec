from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.config import GIB, EngineConfig
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.runner.device_memory import DeviceMemory
from loraplex.engine.runner.memory_plan import MemoryPlan, ModelFootprint, plan_memory

MIB = 1 << 20
FOOTPRINT = ModelFootprint(
    weights_bytes=270 * MIB,
    activation_bytes=100 * MIB,
    kv_block_bytes=MIB,
    slot_bytes=10 * MIB,
    max_position_embeddings=8192,
)


def create_config(**settings: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"model": "folder", "adapter_host_memory_bytes": 0}
    return EngineConfig(**(defaults | settings))


def device_of(total: int, available: int | None = None) -> DeviceMemory:
    return DeviceMemory(total_bytes=total, available_bytes=total if available is None else available)


def plan(config: EngineConfig, memory: DeviceMemory, footprint: ModelFootprint = FOOTPRINT) -> MemoryPlan:
    return plan_memory(config, footprint, memory)


def test_the_fraction_of_the_device_is_divided_without_a_rest() -> None:
    result = plan(create_config(device="cuda", gpu_memory_utilization=0.5), device_of(4 * GIB))
    assert (result.num_slots, result.max_model_len, result.max_lora_rank) == (41, 8192, 256)
    assert result.num_blocks == 2048 - 270 - 100 - 410
    assert result.kv_cache_bytes == result.num_blocks * MIB
    assert result.slots_bytes == 410 * MIB


def test_a_gpu_counts_from_its_total_and_a_cpu_from_what_is_available() -> None:
    memory = device_of(8 * GIB, available=6 * GIB)
    config: dict[str, Any] = {"gpu_memory_utilization": 0.5, "adapter_slots": 1}
    assert plan(create_config(device="cuda", **config), memory).num_blocks == 4096 - 380
    assert plan(create_config(device="cpu", **config), memory).num_blocks == 3072 - 380


def test_a_gpu_never_plans_with_what_others_hold() -> None:
    result = plan(create_config(device="cuda", adapter_slots=1), device_of(8 * GIB, available=GIB))
    assert result.num_blocks == 1024 - 380


def test_the_host_cache_shares_a_cpus_memory_and_takes_at_most_a_quarter() -> None:
    settings: dict[str, Any] = {"adapter_slots": 1, "gpu_memory_utilization": 1.0, "adapter_host_memory_bytes": 4 * GIB}
    assert plan(create_config(device="cpu", **settings), device_of(4 * GIB)).adapter_host_memory_bytes == GIB
    assert plan(create_config(device="cpu", **settings), device_of(4 * GIB)).num_blocks == 3072 - 380
    assert plan(create_config(device="cuda", **settings), device_of(4 * GIB)).adapter_host_memory_bytes == 4 * GIB


def test_no_more_blocks_than_the_sequences_can_use() -> None:
    result = plan(create_config(max_num_seqs=3, max_model_len=100, block_size=16), device_of(64 * GIB))
    assert result.num_blocks == 3 * 7


def test_an_explicit_cache_is_taken_as_given() -> None:
    config = create_config(kv_cache_memory_bytes=3 * GIB // 2, max_num_seqs=1, max_model_len=100)
    assert plan(config, device_of(8 * GIB)).num_blocks == 1536


def test_the_context_is_never_silently_shorter_than_the_models() -> None:
    with pytest.raises(ConfigurationError, match=re.escape("--kv-cache-memory-gib 0.500 or --max-model-len 1600")):
        plan(create_config(kv_cache_memory_bytes=100 * MIB), device_of(8 * GIB))
    assert plan(create_config(kv_cache_memory_bytes=GIB), device_of(8 * GIB)).max_model_len == 8192


@pytest.mark.parametrize(
    ("settings", "memory_gib", "num_slots"),
    [
        ({}, 64, 64),
        ({}, 1, 13),  # a quarter of what is left
        ({"slot_rank": 16}, 0.75, 8),
        ({"slot_rank": 4}, 1, 16),  # rank 64 fits, though that takes more than a quarter
        ({"slot_rank": 4, "max_lora_rank": 10}, 0.5, 3),
        ({"adapter_slots": 5}, 1, 5),
        ({"adapter_memory_bytes": 99 * MIB}, 1, 9),
    ],
)
def test_number_of_slots(settings: dict[str, Any], memory_gib: float, num_slots: int) -> None:
    config = create_config(gpu_memory_utilization=0.9, max_num_seqs=1, max_model_len=16, **settings)
    assert plan(config, device_of(int(memory_gib * GIB))).num_slots == num_slots


@pytest.mark.parametrize(("slots", "max_lora_rank", "effective"), [(2, 256, 16), (40, 256, 256), (2, 8, 8)])
def test_the_effective_rank_is_bounded_by_all_slots(slots: int, max_lora_rank: int, effective: int) -> None:
    config = create_config(adapter_slots=slots, max_lora_rank=max_lora_rank, slot_rank=8)
    assert plan(config, device_of(8 * GIB)).max_lora_rank == effective


def test_adapter_memory_below_one_slot_names_a_value_that_works() -> None:
    config = create_config(adapter_memory_bytes=MIB)
    with pytest.raises(ConfigurationError, match="adapter_memory_gib") as caught:
        plan(config, device_of(8 * GIB))
    (value,) = re.findall(r"--adapter-memory-gib ([\d.]+)", str(caught.value))
    mended = replace(config, adapter_memory_bytes=int(float(value) * GIB))
    assert plan(mended, device_of(8 * GIB)).num_slots == 1


def test_positions_beyond_the_model_are_refused_with_the_bound() -> None:
    with pytest.raises(ConfigurationError, match="--max-model-len 8192"):
        plan(create_config(max_model_len=8193), device_of(8 * GIB))


def test_both_settings_are_named_when_one_sequence_does_not_fit() -> None:
    config = create_config(kv_cache_memory_bytes=100 * MIB, max_model_len=8192)
    with pytest.raises(ConfigurationError) as caught:
        plan(config, device_of(8 * GIB))
    assert "--kv-cache-memory-gib 0.500 or --max-model-len 1600" in str(caught.value)


def test_a_model_larger_than_the_device_is_refused_without_advice_that_fails() -> None:
    with pytest.raises(ConfigurationError, match="smaller model or a device with more memory"):
        plan(create_config(), device_of(100 * MIB))


FOOTPRINTS = st.builds(
    ModelFootprint,
    weights_bytes=st.integers(1, 4 * GIB),
    activation_bytes=st.integers(0, GIB),
    kv_block_bytes=st.integers(64, 64 * MIB),
    slot_bytes=st.integers(1024, 100 * MIB),
    max_position_embeddings=st.integers(1, 200_000),
)

CONFIGS = st.fixed_dictionaries(
    {
        "device": st.sampled_from(["cpu", "cuda"]),
        "max_model_len": st.none() | st.integers(1, 200_000),
        "max_num_seqs": st.integers(1, 300),
        "block_size": st.sampled_from([1, 7, 16, 32]),
        "slot_rank": st.sampled_from([4, 8, 16]),
        "gpu_memory_utilization": st.floats(0.05, 1.0),
        "kv_cache_memory_bytes": st.none() | st.integers(0, 16 * GIB),
        "adapter_slots": st.none() | st.integers(1, 200),
        "adapter_host_memory_bytes": st.integers(0, 8 * GIB),
    }
)


@settings(max_examples=400, deadline=None)
@given(
    footprint=FOOTPRINTS,
    values=CONFIGS,
    total=st.integers(64 * MIB, 16 * GIB),
    available_share=st.floats(0.1, 1.0),
)
def test_a_plan_fits_or_each_offered_value_works(
    footprint: ModelFootprint, values: dict[str, Any], total: int, available_share: float
) -> None:
    memory = device_of(total, available=int(total * available_share))
    values["max_num_batched_tokens"] = 2048
    config = create_config(**values)
    try:
        assert_fits(plan(config, memory, footprint), config, footprint, memory)
    except ConfigurationError as error:
        for remedy in remedies(str(error)):
            mended = replace(config, **remedy)
            assert_fits(plan(mended, memory, footprint), mended, footprint, memory)


def remedies(message: str) -> list[dict[str, Any]]:
    """The settings that a refusal offers, each alternative as the changes it needs, read as the command line does."""
    names: dict[str, Any] = {
        "--kv-cache-memory-gib": lambda text: ("kv_cache_memory_bytes", int(float(text) * GIB)),
        "--max-model-len": lambda text: ("max_model_len", int(text)),
        "--adapter-slots": lambda text: ("adapter_slots", int(text)),
    }
    alternatives = message.rpartition("; use ")[2].split(" or --")
    found = [
        re.findall(r"(--[a-z-]+) ([\d.]+)", text if text.startswith("--") else f"--{text}") for text in alternatives
    ]
    return [dict(names[flag](value) for flag, value in pairs) for pairs in found if pairs]


def assert_fits(result: MemoryPlan, config: EngineConfig, footprint: ModelFootprint, memory: DeviceMemory) -> None:
    assert result.num_blocks * config.block_size >= result.max_model_len >= 1
    assert result.max_model_len <= footprint.max_position_embeddings
    assert config.max_model_len in (None, result.max_model_len)
    assert result.num_slots >= 1
    used = result.weights_bytes + result.activation_bytes + result.slots_bytes + result.kv_cache_bytes
    if config.device == "cpu":
        used += result.adapter_host_memory_bytes
    if config.kv_cache_memory_bytes is None:
        base = memory.available_bytes if config.device == "cpu" else memory.total_bytes
        assert used <= base * config.gpu_memory_utilization
        assert used <= memory.available_bytes
    else:
        assert used <= memory.total_bytes


def test_a_refusal_of_an_explicit_cache_without_advice_is_about_the_device() -> None:
    config = create_config(kv_cache_memory_bytes=GIB)
    with pytest.raises(ConfigurationError, match="more memory"):
        plan(config, device_of(GIB), replace(FOOTPRINT, weights_bytes=2 * GIB))
