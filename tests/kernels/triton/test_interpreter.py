"""Runs the numerical cases in Triton's interpreter, on a CPU.

`TRITON_INTERPRET` counts when Triton is imported, so each file of cases has a process of its own and no other test
sees it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).parent / "interpreted"

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(("name", "num_cases"), [("elementwise", 36), ("lora", 30), ("attention", 29)])
def test_the_kernels_compute_what_they_say(name: str, num_cases: int) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CASES / f"{name}_cases.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    summary = finished.stdout.splitlines()[-1]
    passed = re.match(r"(\d+) passed in ", summary)  # nothing skipped, nothing failed
    assert passed is not None, summary
    assert int(passed[1]) >= num_cases


def test_every_file_of_cases_is_run() -> None:
    assert {path.stem for path in CASES.glob("*.py")} == {"elementwise_cases", "lora_cases", "attention_cases"}
