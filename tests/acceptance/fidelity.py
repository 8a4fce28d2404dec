"""Logits of every position, through the real engine, against what PEFT computed: alone, in a crowd, in chunks.

    python -m tests.acceptance.fidelity [FIXTURES]

FIXTURES holds `peft/index.json` (case -> base), `peft/bases/*`, and a folder a case: an adapter in PEFT's format and
`expected.safetensors` (`input_ids`, `logits` in float32). Without it a handful of cases is made with peft. Every case
that the server would accept must match within 1e-3; a case that it refuses is listed with the reason. Exits 1 when an
accepted case is wrong, or a plain LoRA is refused.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.adapters.errors import AdapterRefusedError
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.demo.model import ensure_demo_model
from tests.acceptance.logits_recorder import LogitsRecorder

TOLERANCE = 1e-3
CHUNK_SIZES = (16, 64, 2048)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
BASE_NOT_SERVED = "base not served:"
DEMO_BASE = "smol"  # how an index calls the demo model, which no folder of bases carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    base: Path
    folder: Path
    input_ids: list[int]
    logits: Tensor  # float32 [positions, vocabulary]; fewer positions than input_ids = the last ones
    is_plain: bool  # may not be refused
    peft_ignored_it: bool  # PEFT loads such a folder with a warning and answers like the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Largest absolute difference of a logit."""

    alone: float
    crowd: float
    chunks: float

    @property
    def worst(self) -> float:
        return max(self.alone, self.crowd, self.chunks)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        fixtures = Path(arguments[0]) if arguments else make_fixtures(Path(scratch))
        cases = list(read_cases(fixtures))
        verdicts: dict[str, str | Errors] = {}
        for base in sorted({case.base for case in cases}):
            verdicts |= judge([case for case in cases if case.base == base], base)
    return report(cases, verdicts)


def read_cases(fixtures: Path) -> Iterator[Case]:
    root = fixtures / "peft"
    for name, entry in json.loads((root / "index.json").read_text()).items():
        base, expected = find_base(root / "bases", entry["base"]), root / name / "expected.safetensors"
        if base is None or not expected.exists():
            continue
        tensors = load_file(expected)
        input_ids = tensors["input_ids"].reshape(-1).tolist()
        logits = tensors["logits"].float().reshape(-1, tensors["logits"].shape[-1])
        is_plain = entry.get("status", "ok") == "ok" and is_plain_lora(root / name)
        yield Case(
            name=name,
            base=base,
            folder=root / name,
            input_ids=input_ids,
            logits=logits,
            is_plain=is_plain,
            peft_ignored_it=entry.get("max_abs_diff_vs_base") == 0.0,
        )


def find_base(bases: Path, name: str) -> Path | None:
    if name == DEMO_BASE:
        return ensure_demo_model(Path(__file__).parents[2] / ".demo")
    return next((folder for folder in sorted(bases.iterdir()) if name in folder.name), None)


def is_plain_lora(folder: Path) -> bool:
    """Nothing but A and B on linear layers, and a configuration that says so."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not (config.exists() and weights.exists()):
        return False
    settings = json.loads(config.read_text())
    special = (
        "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
        "layer_replication", "use_qalora", "use_bdlora", "kasa_config", "velora_config", "monteclora_config",
        "target_parameters", "fan_in_fan_out",
    )  # fmt: skip
    keys = load_file(weights)
    return (
        settings.get("peft_type") == "LORA"
        and settings.get("init_lora_weights") in (True, "gaussian", "orthogonal")
        and not any(settings.get(name) for name in special)
        and all("_proj.lora_" in key and key.startswith("base_model.model.model.layers.") for key in keys)
    )


def judge(cases: Sequence[Case], base: Path) -> dict[str, str | Errors]:
    try:
        llm = open_llm(base, CHUNK_SIZES[-1])
    except Exception as error:  # whatever a base that is not served makes of itself
        return {case.name: f"{BASE_NOT_SERVED} {base.name}: {error}" for case in cases}
    verdicts: dict[str, str | Errors] = {}
    accepted = []
    for case in cases:
        try:
            llm.mix([(case.folder, 1.0)])
            accepted.append(case)
        except AdapterRefusedError as refusal:
            verdicts[case.name] = refusal.message
    if not accepted:
        return verdicts
    alone = [run(llm, [case])[0] for case in accepted]
    crowd = run(llm, accepted, with_base_rows=True)
    chunked = [run(open_llm(base, size), accepted) for size in CHUNK_SIZES[:-1]]
    for number, case in enumerate(accepted):
        verdicts[case.name] = Errors(
            alone=error_of(case, alone[number]),
            crowd=error_of(case, crowd[number]),
            chunks=max(error_of(case, logits[number]) for logits in chunked),
        )
    return verdicts


def open_llm(base: Path, chunk_size: int) -> LLM:
    return LLM(
        base,
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=chunk_size,
        max_num_seqs=min(chunk_size, 64),
        adapter_slots=96,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
    )


def run(llm: LLM, cases: Sequence[Case], *, with_base_rows: bool = False) -> list[Tensor]:
    """Logits [positions, vocabulary] of every case, all in one batch; base rows go between them."""
    prompts: list[list[int]] = []
    selections = []
    for case in cases:
        prompts.append(case.input_ids)
        selections.append(llm.mix([(case.folder, 1.0)]))
        if with_base_rows:
            prompts.append(case.input_ids[: len(case.input_ids) // 2 + 1])
            selections.append(llm.mix([]))
    with LogitsRecorder(llm) as recorder:
        llm.generate(prompts, PARAMS, selections)
    return recorder.logits()[:: 2 if with_base_rows else 1]


def error_of(case: Case, logits: Tensor) -> float:
    return (logits[-len(case.logits) :] - case.logits).abs().max().item()


def report(cases: Sequence[Case], verdicts: dict[str, str | Errors]) -> int:
    bad: list[str] = []
    right: list[str] = []
    worst = 0.0
    say(f"{'case':34} {'alone':>9} {'crowd':>9} {'chunks':>9}")
    for case in cases:
        verdict = verdicts[case.name]
        if isinstance(verdict, str):
            say(f"{case.name:34} refused: {verdict[:150]}")
            if case.is_plain and not verdict.startswith(BASE_NOT_SERVED):
                bad.append(case.name)
            continue
        say(f"{case.name:34} {verdict.alone:9.1e} {verdict.crowd:9.1e} {verdict.chunks:9.1e}")
        if case.peft_ignored_it:
            say(f"{'':34} not judged: PEFT itself applies nothing of it, and answers like the base")
            continue
        worst = max(worst, verdict.worst)
        (right if verdict.worst <= TOLERANCE else bad).append(case.name)
    say(f"{len(right)} served and right, worst {worst:.1e}; {len(bad)} wrong: {' '.join(bad) or '-'}")
    return 1 if bad or not right else 0


def make_fixtures(root: Path) -> Path:
    """Small cases of the kinds that matter, made with peft on a tiny random base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.helpers import ALL_PROJECTIONS, make_adapter, make_checkpoint

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "qv_rank_4": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "rslora": {"r": 16, "use_rslora": True},
        "patterns": {"rank_pattern": {"q_proj": 16, "layers.1.mlp.down_proj": 4}, "alpha_pattern": {"q_proj": 64}},
        "rank_33": {"r": 33},
        "one_layer": {"layers_to_transform": [1], "target_modules": ALL_PROJECTIONS},
    }
    base = make_checkpoint(root / "peft" / "bases" / "tiny-llama")
    input_ids = torch.tensor([[1, *((i * 7 + 3) % 120 + 3 for i in range(69))]])
    for seed, (name, settings) in enumerate(kinds.items()):
        folder = make_adapter(root / "peft" / name, base, seed=seed, **settings)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
        with torch.no_grad():
            logits = model(input_ids=input_ids).logits
        save_file({"input_ids": input_ids, "logits": logits.contiguous()}, folder / "expected.safetensors")
    index = {name: {"base": "tiny", "status": "ok"} for name in kinds}
    (root / "peft" / "index.json").write_text(json.dumps(index))
    return root


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
