"""Logits of every position, through the real engine, against what PEFT computed: alone, in a crowd, in chunks.

    python -m tests.acceptance.fidelity [FIXTURES]

FIXTURES holds `peft/index.json` (case -> base), `peft/bases/*`, and a folder a case: an adapter in PEFT's format and
`expected.safetensors` (`input_ids`, `logits` in float32). Without it a handful of cases is made with peft. Every case
that the server would accept must match within 1e-3 in float32, on every backend; in the half precisions it may be
twice as far from PEFT's float32 logits as PEFT itself is in that precision (not judged where PEFT cannot load it). A
case that is refused is listed with the reason. Exits 1 when an accepted case is wrong, or a plain LoRA is refused.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loraplex.adapters.errors import AdapterRefusedError
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from tests.acceptance.fidelity_cases import Case, make_fixtures, read_cases
from tests.acceptance.logits_recorder import LogitsRecorder

TOLERANCE = 1e-3
HALF_SLACK = 2.0
CHUNK_SIZES = (16, 64, 2048)
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
BASE_NOT_SERVED = "base not served:"


@dataclass(frozen=True, slots=True)
class Setting:
    backend: str
    dtype: str

    @property
    def is_exact(self) -> bool:
        return self.dtype == "float32"

    def __str__(self) -> str:
        return f"{self.backend} {self.dtype}"


SETTINGS = (
    Setting("cpu", "float32"),
    Setting("reference", "float32"),
    Setting("cpu", "bfloat16"),
    Setting("reference", "bfloat16"),
    Setting("reference", "float16"),
)
PEFT_SETTINGS = tuple(Setting("peft", dtype) for dtype in ("bfloat16", "float16"))  # what rounding alone costs
COLUMNS = (*SETTINGS, *PEFT_SETTINGS)
Distances = dict[Setting, float]  # largest absolute difference of a logit from PEFT's in float32


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        fixtures = Path(arguments[0]) if arguments else make_fixtures(Path(scratch))
        cases = list(read_cases(fixtures))
        verdicts: dict[str, str | Distances] = {}
        for base in sorted({case.base for case in cases}):
            verdicts |= judge([case for case in cases if case.base == base], base)
    return report(cases, verdicts)


def judge(cases: Sequence[Case], base: Path) -> dict[str, str | Distances]:
    """Why a case is refused, or how far it is from PEFT in each setting."""
    try:
        llm = open_llm(base, SETTINGS[0])
    except Exception as error:  # whatever a base that is not served makes of itself
        return {case.name: f"{BASE_NOT_SERVED} {base.name}: {error}" for case in cases}
    refusals = {case.name: reason for case in cases if (reason := refusal(llm, case))}
    accepted = [case for case in cases if case.name not in refusals]
    distances: dict[str, Distances] = {case.name: {} for case in accepted}
    if not accepted:
        return dict(refusals)
    for setting in SETTINGS:
        ways = [run(open_llm(base, setting), accepted, with_base_rows=True)]
        if setting.is_exact:
            alone = open_llm(base, setting)
            ways.append([run(alone, [case])[0] for case in accepted])
            ways += [run(open_llm(base, setting, chunk_size=size), accepted) for size in CHUNK_SIZES[:-1]]
        for number, case in enumerate(accepted):
            distances[case.name][setting] = max(distance(case, logits[number]) for logits in ways)
    for case in (case for case in accepted if case.peft_loads_it):
        distances[case.name] |= {setting: distance(case, peft_logits(case, setting)) for setting in PEFT_SETTINGS}
    return {**refusals, **distances}


def refusal(llm: LLM, case: Case) -> str | None:
    try:
        llm.mix([(case.folder, 1.0)])
    except AdapterRefusedError as error:
        return error.message
    return None


def open_llm(base: Path, setting: Setting, *, chunk_size: int = CHUNK_SIZES[-1]) -> LLM:
    return LLM(
        base,
        skip_tokenizer_init=True,
        backend=setting.backend,
        dtype=setting.dtype,
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


def peft_logits(case: Case, setting: Setting) -> Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base: Any = AutoModelForCausalLM.from_pretrained(case.base, dtype=getattr(torch, setting.dtype))
    model = PeftModel.from_pretrained(base, str(case.folder)).eval()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=torch.tensor([case.input_ids])).logits[0].float()
    return logits


def distance(case: Case, logits: Tensor) -> float:
    return (logits[-len(case.logits) :] - case.logits).abs().max().item()


def report(cases: Sequence[Case], verdicts: dict[str, str | Distances]) -> int:
    bad: list[str] = []
    right: list[Distances] = []
    say(f"{'largest distance of a logit':34} " + " ".join(f"{setting!s:>18}" for setting in COLUMNS))
    for case in cases:
        verdict = verdicts[case.name]
        if isinstance(verdict, str):
            say(f"{case.name:34} refused: {verdict[:150]}")
            if case.is_plain and not verdict.startswith(BASE_NOT_SERVED):
                bad.append(case.name)
            continue
        say(f"{case.name:34} {table_row([verdict])}")
        if case.peft_ignored_it:
            say(f"{'':34} not judged: PEFT itself applies nothing of it, and answers like the base")
        elif is_right(verdict):
            right.append(verdict)
        else:
            bad.append(case.name)
    if right:
        say(f"{'worst':34} {table_row(right)}")
    say(f"{len(right)} served and right on every backend; {len(bad)} wrong: {' '.join(bad) or '-'}")
    return 1 if bad or not right else 0


def table_row(rows: Sequence[Distances]) -> str:
    """The worst of each column; nan where nothing was measured."""
    worst = (max((each[setting] for each in rows if setting in each), default=nan) for setting in COLUMNS)
    return " ".join(f"{value:18.1e}" for value in worst)


def is_right(distances: Distances) -> bool:
    allowed = {setting.dtype: HALF_SLACK * distances[setting] for setting in PEFT_SETTINGS if setting in distances}
    allowed["float32"] = TOLERANCE
    return all(distances[setting] <= allowed.get(setting.dtype, inf) for setting in SETTINGS)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
