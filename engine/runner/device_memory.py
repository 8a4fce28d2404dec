"""How much memory a device has, and how much of it is free now."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Bytes of one device. `available_bytes` never exceeds `total_bytes`."""

    total_bytes: int
    available_bytes: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Ask the device. Call it before the model's weights are loaded: the memory plan counts them itself."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total_bytes=total, available_bytes=free)
    return host_memory()


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> DeviceMemory:
    """Memory of this machine, or of the smallest cgroup around this process where that has less."""
    total, available = _machine_memory(proc)
    for limit, used in _cgroup_limits(proc, cgroups):
        total = min(total, limit)
        available = min(available, max(limit - used, 0))
    return DeviceMemory(total_bytes=total, available_bytes=min(available, total))


def _machine_memory(proc: Path) -> tuple[int, int]:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # not Linux: nothing tells what is free without a dependency, so count on half
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    return kib["MemTotal"] * 1024, kib["MemAvailable"] * 1024


def _cgroup_limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of every cgroup above this process that has a limit, of version 2 or 1."""
    try:
        entries = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        if not controllers:
            yield from _limits_upwards(cgroups, path, limit="memory.max", used="memory.current", cache="inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(
                cgroups / "memory",
                path,
                limit="memory.limit_in_bytes",
                used="memory.usage_in_bytes",
                cache="total_inactive_file",
            )


def _limits_upwards(root: Path, path: str, *, limit: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    """Walk from the process' cgroup to the root; in a container the path may not exist and only the root counts."""
    folder = root / path.strip("/")
    for level in (folder, *folder.parents):
        if level.is_relative_to(root) and (level / limit).is_file():
            text = (level / limit).read_text().strip()
            if text != "max":
                # Page cache counts as used, but the kernel gives it up on demand.
                yield int(text), int((level / used).read_text()) - _reclaimable(level / "memory.stat", cache)


def _reclaimable(stat: Path, field: str) -> int:
    values = dict(line.split() for line in stat.read_text().splitlines())
    return int(values.get(field, 0))
