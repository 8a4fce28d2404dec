"""The check for GPU machines: what of it can run without one, and that it needs none of the platform's packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernels import worst_error
from benchmarks.gpu.report import Report

ROOT = Path(__file__).parents[2]
BLOCKED = ("fastapi", "sqlalchemy", "msgspec", "zmq")

_SCRIPT = f"""
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Block())
from benchmarks.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def run_check(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT, "--tiny", "--device", "cpu", *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "OUT": str(out),
            "PYTHONPATH": path,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_tiny_check_passes_on_a_cpu_without_the_packages_of_the_platform(tmp_path: Path) -> None:
    done = run_check(out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "gpu_check.json").read_text())
    assert data["passed"]
    sections = {row["section"] for row in data["rows"]}
    assert sections == {"engine", "kernels", "speed"}
    names = {row["case"] for row in data["rows"]}
    assert {"lora, batch 3: tokens equal those op by op", "tiny, float16: lora gate_up, zipf"} <= names
    table = (tmp_path / "gpu_check.md").read_text()
    assert table in done.stdout
    assert all(row["case"] in table for row in data["rows"])


def test_without_time_every_section_says_so_and_the_check_fails(tmp_path: Path) -> None:
    done = run_check("--budget-s", "-1", out=tmp_path)
    assert done.returncode == 1
    rows = json.loads((tmp_path / "gpu_check.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {"engine", "kernels", "speed"}
    assert all("TimeoutError" in row["figures"]["error"] for row in rows)


def test_a_section_that_fails_does_not_stop_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(budget_s=60)

    def fails() -> None:
        report.add("first", "before")
        raise RuntimeError("no such kernel")

    report.run("first", fails)
    report.run("second", lambda: report.add("second", "a case", error_rate=0.25))
    assert [(row.section, row.passed) for row in report.rows] == [("first", True), ("first", False), ("second", True)]
    assert not report.passed
    assert "| second | a case | error_rate 0.25 | yes |" in report.markdown()
    assert "no such kernel" in capsys.readouterr().out


def test_an_output_that_is_not_finite_is_infinitely_wrong() -> None:
    good = torch.ones(3)
    assert worst_error([good, good], [good, good * 2]) == 0.5
    assert worst_error([torch.tensor([1.0, torch.nan, 1.0])], [good]) == float("inf")
