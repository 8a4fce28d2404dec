"""Runs what is measured in a process of its own, and ends it with all its children when it takes too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.materials import ROOT, Materials
from benchmarks.runners.runner import REPORT_PREFIX
from benchmarks.workloads import Workload

PROCESS_TIMEOUT_S = 600  # for one contestant in one group, its start included
STOP_TIMEOUT_S = 40
KEPT_OF_AN_ERROR = 2000  # characters


def run_contestant(contestant: Contestant, workloads: Sequence[Workload], materials: Materials) -> list[dict[str, Any]]:
    """The reports of one process, one for each workload.

    Raises:
        RuntimeError: it failed or took too long; with the end of what it wrote.
    """
    command = contestant.command()
    for name in ("model", "adapters", "gguf"):
        command += [f"--{name}", str(getattr(materials, name))]
    command += ["--workloads", *(workload.name for workload in workloads)]
    # a peer's own Python sees the runners, and nothing else of ours
    path = {"PYTHONPATH": str(ROOT)} if contestant.runs_in_peer else {}
    lines = _run(command, {**path, **contestant.environment}).splitlines()
    return [json.loads(line.removeprefix(REPORT_PREFIX)) for line in lines if line.startswith(REPORT_PREFIX)]


def run_module(module: str, *arguments: str) -> str:
    """What a module of ours, run as a program, writes to standard output. Raises RuntimeError."""
    return _run([sys.executable, "-m", module, *arguments], {})


def _run(command: Sequence[str | Path], environment: Mapping[str, str]) -> str:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    )
    try:
        output, errors = process.communicate(timeout=PROCESS_TIMEOUT_S)
    except BaseException as error:
        _end(process)
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"not done in {PROCESS_TIMEOUT_S} s") from error
        raise
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}:\n{errors[-KEPT_OF_AN_ERROR:]}")
    return output


def _end(process: subprocess.Popen[str]) -> None:
    """First politely, so that it ends the servers that it started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
