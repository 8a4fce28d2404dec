"""Everything the engine is told, frozen and checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex.engine.errors import ConfigurationError

GIB = 1 << 30

DType = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "cpu", "triton"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Values that need the device (number of blocks) are results, never written back.

    `None` means: decided by the engine (`max_model_len` from the model, the KV cache from
    `gpu_memory_utilization`, slots from `adapter_memory_bytes` or a default).
    """

    model: str  # a folder
    dtype: DType = "auto"
    device: str = "cpu"
    backend: BackendName = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    adapter_slots: int | None = None  # in each of the two spaces
    adapter_memory_bytes: int | None = None
    slot_rank: int = 8
    lora_dtype: DType = "auto"  # of the resident A and B; auto = float32, so that no adapter loses a bit
    max_lora_rank: int = 256
    adapter_host_memory_bytes: int = 4 * GIB
    enforce_eager: bool = False
    num_threads: int | None = None

    def __post_init__(self) -> None:
        minimums = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 1,
            "slot_rank": 1,
            "max_lora_rank": 1,
        }
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                raise ConfigurationError(f"{name} is {getattr(self, name)}; it must be at least {minimum}", param=name)
        for name in ("max_model_len", "adapter_slots", "num_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"{name} is {value}; it must be at least 1", param=name)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization}; it must be above 0 and at most 1",
                param="gpu_memory_utilization",
            )
        if self.adapter_slots is not None and self.adapter_memory_bytes is not None:
            raise ConfigurationError("give adapter_slots or adapter_memory_gib, not both", param="adapter_slots")

    @property
    def num_seats(self) -> int:
        """Requests that may run at once: each of them must be able to decode in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)
