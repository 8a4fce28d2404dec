"""`loraplex demo --once`, as a stranger runs it first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO_DIR = Path(__file__).parents[2] / ".demo"


@pytest.mark.timeout(1200)  # on a fresh checkout it trains the adapters first
def test_the_demo_shows_the_base_both_adapters_and_a_mix() -> None:
    command = [str(Path(sys.executable).with_name("loraplex")), "demo", "--once", "--dir", str(DEMO_DIR)]
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "160"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = dict(re.findall(r"^│ (.+?) +│ (.+?) +│ +\d+ │$", done.stdout, re.MULTILINE))
    assert answers["base"] == "The capital of France is Paris."
    assert {name.partition(":")[0] for name in answers} == {"base", "json", "support", "mix"}
