"""What `loraplex serve` prints when it is ready: one screen that says what runs, where, and with how much memory."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from loraplex.engine.config import GIB
from loraplex.engine.messages import MemoryPlan
from loraplex.platform.services import Services
from loraplex.platform.settings import redact_url

MIB = 1 << 20


def print_summary(services: Services, url: str) -> None:
    console = Console(file=sys.stdout, highlight=False)
    console.print("\nLoRAplex is ready", style="bold")
    for name, value in _rows(services, url).items():
        console.print(Text.assemble((f"{name:<10}", "bold"), value), soft_wrap=True)
    console.print()
    console.file.flush()  # a log file or a parent process reads it as well


def _rows(services: Services, url: str) -> dict[str, str]:
    settings, info = services.settings, services.engine.info
    num_tokens = info.num_blocks * info.block_size
    return {
        "model": f"{settings.served_model_name} ({settings.model})",
        "engine": f"{info.dtype}, backend {info.backend} on {info.device}, {info.num_threads} threads",
        "context": f"{info.max_model_len} tokens",
        "step": f"up to {info.max_num_seqs} requests and {info.max_num_batched_tokens} tokens",
        "memory": _memory(info.memory),
        "KV cache": f"{info.num_blocks} blocks of {info.block_size} = {num_tokens} tokens",
        "adapters": f"{info.num_slots} slots of rank {info.slot_rank} in each space, ranks up to {info.max_lora_rank}",
        "data": f"{settings.data_dir}, {redact_url(settings.database_url.get_secret_value())}",
        "URL": f"{url}/v1",
    }


def _memory(plan: MemoryPlan) -> str:
    parts = {
        "weights": plan.weights_bytes,
        "adapter slots": plan.slots_bytes,
        "activations": plan.peak_activation_bytes,
        "KV cache": plan.kv_cache_bytes,
    }
    return f"{_size(plan.budget_bytes)}: " + ", ".join(f"{name} {_size(size)}" for name, size in parts.items())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / MIB:.0f} MiB"
