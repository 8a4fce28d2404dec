"""Divides a device's memory between weights, adapter slots, activations and the KV cache. Pure arithmetic.

    +---------+-------------+---------------+------------+----------------------------------+
    | weights | activations | adapter slots | host cache | KV cache: num_blocks blocks      |
    +---------+-------------+---------------+------------+----------------------------------+
    |<------------ budget: gpu_memory_utilization of the device ------------------------->|

The host cache of adapters takes part only where the device's memory is the host's (CPU). An explicit
`kv_cache_memory_bytes` stands outside the budget and may use what the device has in all.
"""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.engine.config import GIB, EngineConfig
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.runner.device_memory import DeviceMemory

DEFAULT_NUM_SLOTS = 64
DEFAULT_MIN_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """What a model takes, in bytes, and how far its positions reach."""

    weights_bytes: int
    activation_bytes: int  # peak of one step, logits and sampling included
    kv_block_bytes: int  # one block in all layers
    slot_bytes: int  # one attention slot and one MLP slot
    max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What every part gets. `num_slots` holds for each of the two slot spaces."""

    num_blocks: int
    num_slots: int
    max_model_len: int
    max_lora_rank: int  # effective: a single adapter must fit the slots
    weights_bytes: int
    activation_bytes: int
    slots_bytes: int
    adapter_host_memory_bytes: int
    kv_cache_bytes: int


def plan_memory(config: EngineConfig, footprint: ModelFootprint, memory: DeviceMemory) -> MemoryPlan:
    """Decide `num_blocks`, `num_slots`, `max_model_len` and the effective maximum rank.

    `memory` is what the device had before the weights were loaded. Raise ConfigurationError when not even one
    sequence of `max_model_len` fits; every value that the message offers works.
    """
    return _Planner(config, footprint, memory).plan()


class _Planner:
    """The sums that the plan and its refusals share."""

    def __init__(self, config: EngineConfig, footprint: ModelFootprint, memory: DeviceMemory) -> None:
        self._config = config
        self._footprint = footprint
        self._is_host = config.device.partition(":")[0] == "cpu"
        budget = self._budget(memory)
        self._host_cache = self._host_cache_bytes(budget)
        fixed = footprint.weights_bytes + footprint.activation_bytes + (self._host_cache if self._is_host else 0)
        self._rest = budget - fixed
        self._num_slots = _num_slots(config, footprint, self._rest)
        slots_bytes = self._num_slots * footprint.slot_bytes
        self._kv_budget = max(self._rest - slots_bytes, 0)
        self._kv_limit = max(memory.total_bytes - fixed - slots_bytes, 0)  # of an explicit kv_cache_memory_bytes

    def plan(self) -> MemoryPlan:
        config, footprint = self._config, self._footprint
        num_blocks = self._num_blocks()
        max_model_len = config.max_model_len or footprint.max_position_embeddings
        if num_blocks < self._blocks_of(self._wanted_len):
            raise self._too_small(num_blocks)
        if max_model_len > footprint.max_position_embeddings:
            raise self._too_long()
        if config.kv_cache_memory_bytes is None:
            num_blocks = min(num_blocks, config.num_seats * self._blocks_of(max_model_len))
        return MemoryPlan(
            num_blocks=num_blocks,
            num_slots=self._num_slots,
            max_model_len=max_model_len,
            max_lora_rank=min(config.max_lora_rank, self._num_slots * config.slot_rank),
            weights_bytes=footprint.weights_bytes,
            activation_bytes=footprint.activation_bytes,
            slots_bytes=self._num_slots * footprint.slot_bytes,
            adapter_host_memory_bytes=self._host_cache,
            kv_cache_bytes=num_blocks * footprint.kv_block_bytes,
        )

    @property
    def _wanted_len(self) -> int:
        """The length that the KV cache is to hold: as told, within the model's positions."""
        reach = self._footprint.max_position_embeddings
        return min(self._config.max_model_len or reach, reach)

    def _budget(self, memory: DeviceMemory) -> int:
        """A share of the device; on a CPU, which serves others too, of the memory that is available now."""
        base = memory.available_bytes if self._is_host else memory.total_bytes
        return min(int(base * self._config.gpu_memory_utilization), memory.available_bytes)

    def _host_cache_bytes(self, budget: int) -> int:
        """On a CPU the host cache shares the budget and takes at most a quarter of it."""
        wanted = self._config.adapter_host_memory_bytes
        return min(wanted, budget // 4) if self._is_host else wanted

    def _num_blocks(self) -> int:
        explicit = self._config.kv_cache_memory_bytes
        if explicit is not None and explicit > self._kv_limit:
            raise self._too_large(explicit)
        return max(self._kv_budget if explicit is None else explicit, 0) // self._footprint.kv_block_bytes

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._config.block_size)

    def _too_small(self, num_blocks: int) -> ConfigurationError:
        """The KV cache does not hold one sequence: say what would."""
        needed = self._blocks_of(self._wanted_len) * self._footprint.kv_block_bytes
        remedies = [*self._larger_cache(needed), *self._shorter_sequences(num_blocks)] or self._fewer_slots(needed)
        return _refusal(
            f"the KV cache has room for {num_blocks * self._config.block_size} tokens; one sequence of "
            f"max_model_len {self._wanted_len} takes {_gib(_milli_gib_above(needed))} GiB",
            remedies,
            param="kv_cache_memory_gib",
        )

    def _too_large(self, explicit: int) -> ConfigurationError:
        """The explicit KV cache does not fit beside everything else: say what does."""
        limit = _milli_gib_below(self._kv_limit)
        num_blocks = _bytes_of(limit) // self._footprint.kv_block_bytes
        remedy = f"--kv-cache-memory-gib {_gib(limit)}{self._with_length(num_blocks)}"
        return _refusal(
            f"kv_cache_memory_gib is {explicit / GIB:.3f}; beside weights, activations and adapter slots this device "
            f"has room for {_gib(limit)}",
            [remedy] if num_blocks >= 1 else [],
            param="kv_cache_memory_gib",
        )

    def _too_long(self) -> ConfigurationError:
        given, reach = self._config.max_model_len, self._footprint.max_position_embeddings
        return _refusal(
            f"max_model_len is {given}, but the model's positions end at {reach}",
            [f"--max-model-len {reach}"],
            param="max_model_len",
        )

    def _larger_cache(self, needed: int) -> list[str]:
        above, below = _milli_gib_above(needed), _milli_gib_below(self._kv_limit)
        num_blocks = _bytes_of(below) // self._footprint.kv_block_bytes
        if above <= below:
            return [f"--kv-cache-memory-gib {_gib(above)}{self._with_length(self._blocks_of(self._wanted_len))}"]
        if self._config.max_model_len is None and num_blocks >= 1:
            return [f"--kv-cache-memory-gib {_gib(below)}{self._with_length(num_blocks)}"]
        return []

    def _shorter_sequences(self, num_blocks: int) -> list[str]:
        return [f"--max-model-len {num_blocks * self._config.block_size}"] if num_blocks >= 1 else []

    def _fewer_slots(self, needed: int) -> list[str]:
        """Slots that, given up, make room in the budget; a last resort, since they are what serves adapters."""
        count = (self._rest - needed) // self._footprint.slot_bytes
        if self._config.kv_cache_memory_bytes is not None or count < 1:
            return []
        instead = "" if self._config.adapter_memory_bytes is None else " instead of --adapter-memory-gib"
        return [f"--adapter-slots {count}{instead}{self._with_length(self._blocks_of(self._wanted_len))}"]

    def _with_length(self, num_blocks: int) -> str:
        """What a remedy needs besides, when `num_blocks` or the model's positions do not reach `max_model_len`."""
        reach = self._footprint.max_position_embeddings
        length = min(num_blocks * self._config.block_size, reach)
        return f" with --max-model-len {length}" if (self._config.max_model_len or reach) > length else ""


def _num_slots(config: EngineConfig, footprint: ModelFootprint, rest: int) -> int:
    """The number of slots in each space; `rest` is what the budget leaves beside the fixed parts.

    Without a setting: DEFAULT_NUM_SLOTS, fewer where they would take more than a quarter of the rest, but never too
    few for one adapter of rank DEFAULT_MIN_RANK (or of `max_lora_rank`, if that is smaller).
    """
    if config.adapter_slots is not None:
        return config.adapter_slots
    if config.adapter_memory_bytes is not None:
        count = config.adapter_memory_bytes // footprint.slot_bytes
        if count < 1:
            smallest = _gib(_milli_gib_above(footprint.slot_bytes))
            raise _refusal(
                f"adapter_memory_gib is {config.adapter_memory_bytes / GIB:.3f}, less than one slot of "
                f"{config.slot_rank} ranks takes",
                [f"--adapter-memory-gib {smallest}"],
                param="adapter_memory_gib",
            )
        return count
    least = -(-min(DEFAULT_MIN_RANK, config.max_lora_rank) // config.slot_rank)
    return max(min(DEFAULT_NUM_SLOTS, rest // 4 // footprint.slot_bytes), least)


def _refusal(fact: str, remedies: list[str], *, param: str) -> ConfigurationError:
    advice = f"use {' or '.join(remedies)}" if remedies else "use a smaller model or a device with more memory"
    return ConfigurationError(f"{fact}; {advice}", param=param)


# Settings are given in GiB with three decimals: a suggestion is rounded to the side on which it works.


def _milli_gib_above(num_bytes: int) -> int:
    return -(-num_bytes * 1000 // GIB)


def _milli_gib_below(num_bytes: int) -> int:
    return num_bytes * 1000 // GIB


def _bytes_of(milli_gib: int) -> int:
    return milli_gib * GIB // 1000


def _gib(milli_gib: int) -> str:
    return f"{milli_gib // 1000}.{milli_gib % 1000:03d}"
