"""The library is compiled once, and where it cannot be, the reference serves and says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from loraplex.kernels.cpu import build as build_module
from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.build import NativeBuildError, build
from loraplex.kernels.dispatch import create_backend

CPU = torch.device("cpu")


def fake_compiler(folder: Path, body: str) -> None:
    """Takes the place of every compiler on the path."""
    for name in build_module.COMPILERS:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


COUNTING = """
[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }
while [ "$1" != -o ]; do shift; done
echo compiled >> {log}
echo library > "$2"
"""


def test_it_is_compiled_once_for_equal_sources_and_flags(compilers: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake_compiler(compilers, COUNTING.replace("{log}", str(log)))
    first = build(cache=tmp_path / "cache")
    assert build(cache=tmp_path / "cache") == first
    other = build(target=("-march=other",), cache=tmp_path / "cache")
    assert other != first
    assert log.read_text().splitlines() == ["compiled"] * 2
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted([first.name, other.name])


def test_a_newer_compiler_compiles_again(compilers: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = COUNTING.replace("{log}", str(log))
    fake_compiler(compilers, script)
    first = build(cache=tmp_path / "cache")
    fake_compiler(compilers, script.replace("1.0", "2.0"))
    assert build(cache=tmp_path / "cache") != first


def test_a_failing_compiler_leaves_nothing_behind_and_is_quoted(compilers: Path, tmp_path: Path) -> None:
    fake_compiler(compilers, '[ "$1" = --version ] && exit 0; echo "no such header" >&2; exit 7')
    with pytest.raises(NativeBuildError, match=r"status 7: no such header"):
        build(cache=tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said(compilers: Path, tmp_path: Path) -> None:
    fake_compiler(compilers, "exit 0")
    (tmp_path / "file").write_text("")
    with pytest.raises(NativeBuildError, match="cannot be written"):
        build(cache=tmp_path / "file" / "cache")


def test_a_file_that_is_no_library_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("not a library")
    with pytest.raises(NativeBuildError, match="cannot be loaded"):
        native.load(tmp_path / "x.so")


@pytest.mark.usefixtures("compilers")
def test_without_a_compiler_auto_is_the_reference_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert create_backend("auto", CPU).name == "reference"
    assert "no C++ compiler is installed" in caplog.text


@pytest.mark.usefixtures("compilers")
def test_without_a_compiler_the_cpu_backend_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'cpu' does not run here: no C\+\+ compiler"):
        create_backend("cpu", CPU)


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_a_cpu_takes_the_compiled_kernels(name: str) -> None:
    assert create_backend(name, CPU).name == "cpu"


def test_the_cpu_backend_is_refused_for_other_devices() -> None:
    with pytest.raises(ValueError, match="needs a CPU, and this is 'meta'"):
        create_backend("cpu", torch.device("meta"))
    assert create_backend("auto", torch.device("meta")).name == "reference"
