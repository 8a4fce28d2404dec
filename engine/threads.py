"""How many threads the engine computes with on a CPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_num_threads() -> int:
    """The physical cores that this process may use, at least 1.

    Two threads of one core share its vector units, and threads beyond a container's CPU quota are stopped for the
    rest of each period while the others wait for them.
    """
    return int(max(1, min(len(physical_cores()), _quota())))


def physical_cores() -> list[int]:
    """One CPU of each physical core that this process may use, rising."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted({_core_of(cpu): cpu for cpu in sorted(usable, reverse=True)}.values())


def _core_of(cpu: int) -> str:
    """The CPUs of a core, as the kernel lists them; the CPU itself where it does not tell."""
    try:
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float:
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return math.inf
    return math.inf if quota == "max" else math.ceil(int(quota) / int(period))
