"""The files that everybody in a run reads: one model, one set of adapters, in the formats that the peers take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import gguf_files
from benchmarks.contestants import Contestant
from benchmarks.peers import llama_source
from benchmarks.request_set import ensure_adapters
from benchmarks.workloads import Workload
from loraplex.platform.demo.model import demo_gguf_file, ensure_demo_model

ROOT = Path(__file__).parents[1]
DEMO_DIR = ROOT / ".demo"
DEMO_ADAPTERS = DEMO_DIR / "bench-adapters"


@dataclass(frozen=True, slots=True, kw_only=True)
class Materials:
    model: Path
    adapters: Path
    gguf: Path


def demo_model() -> Path:
    """SmolLM2-135M-Instruct as a folder; expanded at the first time."""
    return ensure_demo_model(DEMO_DIR)


def prepare_materials(taking_part: Sequence[Contestant], workloads: Sequence[Workload]) -> Materials:
    """Make what is not there yet; two minutes at the first time."""
    materials = Materials(model=demo_model(), adapters=DEMO_ADAPTERS, gguf=ROOT / "build" / "bench" / "gguf")
    ensure_adapters(materials.model, materials.adapters, max(workload.num_adapters for workload in workloads))
    for contestant in taking_part:
        if contestant.is_installed:
            _prepare_gguf(contestant, workloads, materials)
    return materials


def _prepare_gguf(contestant: Contestant, workloads: Sequence[Workload], materials: Materials) -> None:
    if contestant.product == "openvino-genai":
        gguf_files.ensure_model(demo_gguf_file(), materials.gguf, "f16")
    if contestant.product == "llama.cpp":
        assert contestant.peer is not None
        gguf_files.ensure_model(demo_gguf_file(), materials.gguf, "bf16")
        gguf_files.ensure_adapters(
            llama_source(contestant.peer) / "convert_lora_to_gguf.py",
            materials.model,
            materials.adapters,
            materials.gguf,
            max((each.num_adapters for each in contestant.workloads if each in workloads), default=0),
        )
