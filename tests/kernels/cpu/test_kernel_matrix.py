"""Every test of LoRA and attention, on the C++ backend in each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels.attention.test_matrix import test_the_matrix as test_attention_matrix  # noqa: F401
from tests.kernels.attention.test_norm_rotary_store import *  # noqa: F403 - all of them, also those added later
from tests.kernels.attention.test_paged_attention import *  # noqa: F403
from tests.kernels.cpu.helpers import TARGETS, create_cpu_backend, matrix_on
from tests.kernels.lora.test_batch_invariance import *  # noqa: F403
from tests.kernels.lora.test_lora_apply import *  # type: ignore[assignment] # noqa: F403 - helpers of one name
from tests.kernels.lora.test_matrix import test_the_matrix as test_lora_matrix  # noqa: F401


@pytest.fixture(scope="module", autouse=True, params=TARGETS)
def on_cpu_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    with matrix_on(create_cpu_backend(request.param)):
        yield
