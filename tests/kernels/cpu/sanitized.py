"""Runs kernel tests on a build with sanitizers; `test_sanitizers.py` starts it in a process that preloads them."""

from __future__ import annotations

import sys

import pytest

from tests.kernels.cpu import helpers

SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
SUBSET = (
    "linear_is_x or out_of_the_panels or apart or norms_equal or every_fusion or every_rank or every_grouping or window"
    " or mixed"
)

if __name__ == "__main__":
    target = (*helpers.TARGETS[sys.argv[1]], *SANITIZE)
    helpers.TARGETS.clear()
    helpers.TARGETS["sanitized"] = target
    folder = "tests/kernels/cpu"
    files = [f"{folder}/test_backend.py", f"{folder}/test_kernel_matrix.py"]
    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *files, "-k", SUBSET]))
