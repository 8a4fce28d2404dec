"""Runs the numerical cases in Triton's interpreter, on a CPU.

`TRITON_INTERPRET` counts when Triton is imported, so the cases have a process of their own and no other test sees it.
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
AT_LEAST = {"attention_cases": 85, "elementwise_cases": 36, "lora_cases": 32, "quant_cases": 55}

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only"),
    pytest.mark.timeout(900),
]


def test_the_kernels_compute_what_they_say() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *sorted(CASES.glob("*_cases.py"))],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stdout[-20000:] + finished.stderr
    passed = re.findall(r"(\w+_cases)\.py::\S+(?: .*)? PASSED", finished.stdout)
    assert {name: passed.count(name) >= count for name, count in AT_LEAST.items()} == dict.fromkeys(AT_LEAST, True)
    assert re.search(r"= \d+ passed in ", finished.stdout), "something was skipped"


def test_every_file_of_cases_is_run() -> None:
    assert {path.stem for path in CASES.glob("*.py")} == set(AT_LEAST)
