"""One thread for each physical core that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loraplex.engine import threads


def machine(folder: Path, siblings: dict[int, str], quota: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, text in siblings.items():
        topology = folder / f"cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    if quota:
        (folder / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(threads, "CPUS", folder)
    monkeypatch.setattr(threads, "CPU_QUOTA", folder / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings))


@pytest.mark.parametrize(
    ("siblings", "quota", "expected"),
    [
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, None, 2),
        ({0: "0,2"}, "max 100000", 1),
        ({0: "0", 1: "1", 2: "2", 3: "3"}, "150000 100000", 2),
        ({0: "0", 1: "1"}, "10000 100000", 1),
        ({}, None, 1),
    ],
)
def test_threads_are_physical_cores_within_the_quota(
    siblings: dict[int, str], quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(tmp_path, siblings, quota, monkeypatch)
    assert threads.default_num_threads() == expected


def test_a_core_is_named_by_its_first_cpu_that_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {1: "1,5", 2: "2,6", 5: "1,5", 6: "2,6", 8: "4,8"}, None, monkeypatch)
    assert threads.physical_cores() == [1, 2, 8]


def test_a_kernel_that_tells_nothing_of_its_cores_counts_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(tmp_path, {}, None, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert threads.default_num_threads() == 3
