"""Compiles the kernels for this machine's processor, once, into the user's cache.

The file is named by what it was made from: sources, compiler, processor and flags. It is written beside its place
and then moved, so processes that build at the same time do no harm.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++")
NATIVE = ("-march=native",)
# Not -ffast-math: it makes the loader switch the whole process to flushing denormals to zero.
# Hidden: the loader would otherwise give two variants in one process a single copy of their static tables.
FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"),
    *("-fvisibility=hidden", "-fPIC", "-shared", "-w"),
)
_TIMEOUT_S = 300


class NativeBuildError(Exception):
    """The kernels cannot be compiled or loaded here; the message says why."""


def build(*, target: Sequence[str] = NATIVE, cache: Path | None = None) -> Path:
    """The compiled library, from the cache where it is there already.

    Args:
        target: compiler flags that choose the instruction set.
        cache: a folder; None = `loraplex/native` in the user's cache.

    Raises:
        NativeBuildError: there is no compiler, it fails, or the cache cannot be written.
    """
    compiler = _find_compiler()
    flags = (*FLAGS, *target)
    library = (cache or _user_cache()) / f"{_digest(compiler, flags)}.so"
    if not library.exists():
        _compile(compiler, flags, library)
    return library


def _find_compiler() -> str:
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise NativeBuildError(f"no C++ compiler is installed; one of {' and '.join(COMPILERS)} is needed")


def _user_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "loraplex" / "native"


def _digest(compiler: str, flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for fact in (_run([compiler, "--version"]), _processor(), *flags):
        digest.update(b"\0" + fact.encode())
    return digest.hexdigest()


def _processor() -> str:
    """Model and instruction sets: a cache in a home folder may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    kept = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(kept))


def _compile(compiler: str, flags: Sequence[str], library: Path) -> None:
    logger.warning("compiling the CPU kernels for this processor, once, with %s (10 to 30 seconds)", compiler)
    started = time.monotonic()
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            unfinished = Path(folder) / library.name
            _run([compiler, *flags, str(SOURCES / "exports.cpp"), "-o", str(unfinished)])
            os.replace(unfinished, library)
    except OSError as error:
        raise NativeBuildError(f"the cache {library.parent} cannot be written: {error}") from error
    logger.info("the CPU kernels took %.0f s to compile: %s", time.monotonic() - started, library)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeBuildError(f"the compiler does not run: {error}") from error
    if done.returncode:
        raise NativeBuildError(f"{command[0]} failed with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def main() -> None:
    """`python -m loraplex.kernels.cpu.build`: compile now rather than at the first start."""
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    try:
        logger.info("the CPU kernels: %s", build())
    except NativeBuildError as error:
        logger.warning("the reference backend will serve, at a fraction of the speed: %s", error)


if __name__ == "__main__":
    main()
