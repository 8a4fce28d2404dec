"""No access beyond a buffer and no undefined behaviour, over odd sizes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.cpu.helpers import TARGETS

ROOT = Path(__file__).parents[3]


def runtimes() -> list[str]:
    """The compiler's sanitizer libraries; it repeats the bare name of one that it has not."""
    compiler = shutil.which("g++")
    if compiler is None:
        return []
    names = ("libasan.so", "libubsan.so")
    found = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in names
    ]
    return [] if any(path in names for path in found) else found


@pytest.mark.skipif(not runtimes(), reason="needs g++ with its sanitizer libraries")
@pytest.mark.parametrize("target", [name for name in TARGETS if name in ("native", "scalar")])
def test_kernels_are_clean_under_sanitizers(target: str) -> None:
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes()),
        "ASAN_OPTIONS": "detect_leaks=0:verify_asan_link_order=0",  # Python itself keeps memory to its end
        "OMP_NUM_THREADS": "2",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cpu.sanitized", target],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
