"""Decode steps on padded static buffers with the kernels that a GPU would run, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).parent / "interpreted" / "graph_cases.py"


@pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")
def test_the_triton_kernels_take_padded_batches() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CASES],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},  # counts when Triton is imported
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "2 passed" in finished.stdout.splitlines()[-1]
