from __future__ import annotations

from pathlib import Path

import torch

from loraplex.engine.runner.device_memory import device_memory, host_memory

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\nHugePages_Total:   0\n"
KIB = 1024


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_this_machine_answers() -> None:
    memory = device_memory(torch.device("cpu"))
    assert 0 < memory.available_bytes <= memory.total_bytes


def test_without_a_cgroup_the_machine_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})
    memory = host_memory(tmp_path / "proc", tmp_path / "cgroup")
    assert (memory.total_bytes, memory.available_bytes) == (1000 * KIB, 600 * KIB)


def test_the_tightest_cgroup_above_the_process_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            "cgroup/a/memory.max": str(400 * KIB),
            "cgroup/a/memory.current": str(300 * KIB),
            "cgroup/a/memory.stat": f"anon 5\ninactive_file {50 * KIB}\n",
            "cgroup/a/b/memory.max": "max\n",
        },
    )
    memory = host_memory(tmp_path / "proc", tmp_path / "cgroup")
    assert (memory.total_bytes, memory.available_bytes) == (400 * KIB, 150 * KIB)


def test_version_one_cgroups_count_too_and_no_limit_is_no_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x\n",
            "cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
            "cgroup/memory/memory.usage_in_bytes": str(500 * KIB),
            "cgroup/memory/memory.stat": f"total_inactive_file {100 * KIB}\n",
        },
    )
    assert host_memory(tmp_path / "proc", tmp_path / "cgroup").available_bytes == 600 * KIB
    write(tmp_path, {"cgroup/memory/memory.limit_in_bytes": str(700 * KIB)})
    memory = host_memory(tmp_path / "proc", tmp_path / "cgroup")
    assert (memory.total_bytes, memory.available_bytes) == (700 * KIB, 300 * KIB)


def test_a_full_cgroup_leaves_nothing(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/\n",
            "cgroup/memory.max": str(100 * KIB),
            "cgroup/memory.current": str(120 * KIB),
            "cgroup/memory.stat": "anon 1\n",
        },
    )
    assert host_memory(tmp_path / "proc", tmp_path / "cgroup").available_bytes == 0


def test_a_machine_without_proc_counts_on_half(tmp_path: Path) -> None:
    memory = host_memory(tmp_path / "none", tmp_path / "none")
    assert memory.available_bytes == memory.total_bytes // 2 > 0
