"""When the triton backend is taken, and what is said when it is not."""

from __future__ import annotations

import importlib.util
import logging
import sys

import pytest
import torch

from loraplex.kernels import dispatch
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.triton_configs import nearest_architecture

CUDA = torch.device("cuda", 0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton exists for Linux only")


@pytest.fixture
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_compute_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_an_h200")
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_a_cuda_device_gets_triton(name: str) -> None:
    assert create_backend(name, CUDA).name == "triton"


@pytest.mark.usefixtures("_an_h200")
def test_reference_is_still_to_be_had_on_a_cuda_device() -> None:
    assert create_backend("reference", CUDA).name == "reference"


def test_a_cpu_never_gets_triton() -> None:
    assert create_backend("auto", torch.device("cpu")).name != "triton"
    with pytest.raises(ValueError, match="needs a CUDA device, and this is 'cpu'; take auto or reference"):
        create_backend("triton", torch.device("cpu"))


def test_an_old_gpu_is_served_by_reference_and_the_log_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_compute_capability", lambda device: (7, 5))
    with caplog.at_level(logging.WARNING):
        assert create_backend("auto", CUDA).name == "reference"
    assert "needs compute capability 8.0, and cuda:0 has 7.5" in caplog.text
    with pytest.raises(ValueError, match=r"has 7\.5"):
        create_backend("triton", CUDA)


@pytest.mark.usefixtures("_an_h200")
def test_a_machine_without_the_package_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package triton is not installed"):
        create_backend("triton", CUDA)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 0), 80), ((8, 6), 80), ((8, 9), 80), ((9, 0), 90), ((10, 0), 90), ((12, 0), 90)],
)
def test_a_gpu_takes_the_newest_table_that_is_not_newer(capability: tuple[int, int], architecture: int) -> None:
    assert nearest_architecture(capability) == architecture
