"""Is this folder an adapter that this base can serve? Torch-free; reads no tensor values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.file_names import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    check_file_name,
    dropped_file_warning,
    is_version_file,
)
from loraplex.adapters.folder import adapter_root, open_regular, version_files
from loraplex.adapters.layout import ModuleLayout, build_layout
from loraplex.adapters.name_patterns import PatternError, compile_pattern
from loraplex.adapters.peft_config import MAX_CONFIG_BYTES, ParsedConfig, PeftConfig, parse_config
from loraplex.adapters.refusals import Refusals, refused, shown, shown_value
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.tensor_index import read_tensor_index
from loraplex.adapters.turns import Piece, unpaced
from loraplex.adapters.vocabulary import check_vocabulary

_MAX_WARNINGS = 50


class ModuleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one base module gets from the adapter."""

    path: str
    rank: int
    scaling: float  # alpha / r or alpha / sqrt(r), as float32


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a folder that passed; JSON-able by msgspec."""

    peft_type: str  # "LORA"
    use_rslora: bool
    rank: int  # the largest
    modules: tuple[ModuleFacts, ...]
    target_modules: tuple[str, ...]  # short names, e.g. ("q_proj", "v_proj")
    num_tensors: int
    num_mapped_tensors: int
    dtypes: tuple[str, ...]  # safetensors names, e.g. ("BF16",)
    num_attention_slots: int
    num_mlp_slots: int
    size_bytes: int  # of the version's files
    base_model_name: str | None
    warnings: tuple[str, ...]


class AdapterPlan(NamedTuple):
    """Config, tensors and their layout: what both the validator and the loader work from."""

    parsed: ParsedConfig | None
    entries: list[TensorEntry]
    layouts: list[ModuleLayout]


def inspect_adapter(
    folder: Path, base: BaseSpec, *, max_lora_rank: int, slot_rank: int, num_slots: int
) -> AdapterFacts:
    """Check files, config, headers, names and shapes of the adapter in `folder`.

    `max_lora_rank` is the effective one; `num_slots` is that of each space.

    Raises:
        AdapterRefusedError: with every reason that was found.
    """
    refusals = Refusals()
    root = adapter_root(folder)
    if not root.is_dir():
        raise refused("folder_missing", f"{shown(str(folder))} is not a folder; give the folder that PEFT saved")
    warnings = _check_files(root, refusals)
    plan = read_plan(root, base, refusals, max_lora_rank=max_lora_rank)
    if plan.parsed is not None:
        warnings += _check_against_tensors(plan.parsed, plan, refusals)
    warnings += check_vocabulary(root, base, refusals)
    attention, mlp = (count_slots(plan.layouts, slot_rank, attention=space) for space in (True, False))
    _check_slots(attention, mlp, num_slots, refusals)
    refusals.raise_if_any()
    assert plan.parsed is not None, "a config that cannot be read is a refusal"
    return _facts(root, plan.parsed.config, plan, (attention, mlp), warnings)


def read_plan(
    root: Path, base: BaseSpec, refusals: Refusals, *, max_lora_rank: int | None = None, piece: Piece = unpaced
) -> AdapterPlan:
    """Read config and headers and map the tensors; complete only if `refusals` stays empty."""
    with piece():
        parsed = _read_config(root, refusals)
        if parsed is not None and max_lora_rank is not None:
            _check_ranks(parsed.config, max_lora_rank, refusals)
    with piece():
        entries = read_tensor_index(root, refusals)
    if parsed is None or entries is None:
        return AdapterPlan(parsed, entries or [], [])
    with piece():
        return AdapterPlan(parsed, entries, build_layout(entries, parsed.rule, base, refusals))


def count_slots(layouts: Sequence[ModuleLayout], slot_rank: int, *, attention: bool) -> int:
    """Slots of one space that the largest rank among its modules fills."""
    ranks = [layout.rank for layout in layouts if layout.specs[0].projection.is_attention is attention]
    return -(-max(ranks, default=0) // slot_rank)


def _check_files(root: Path, refusals: Refusals) -> list[str]:
    warnings = []
    names = sorted(os.listdir(root))
    has_weights = WEIGHTS_FILE in names or INDEX_FILE in names
    for name in names:
        reason = check_file_name(name)
        if reason is not None and (not has_weights or name.startswith("adapter_model")):
            refusals.add_reason(reason)
        elif not is_version_file(name) and (warning := dropped_file_warning(name)) is not None:
            warnings.append(warning)
    return warnings


def _read_config(root: Path, refusals: Refusals) -> ParsedConfig | None:
    try:
        with refusals.collecting(), open_regular(root / CONFIG_FILE) as file:
            return parse_config(file.read(MAX_CONFIG_BYTES + 1), refusals)
    except FileNotFoundError:
        remedy = "upload the folder that PEFT's save_pretrained wrote, with adapter_config.json"
        refusals.add("config_missing", f"{CONFIG_FILE} is missing", file=CONFIG_FILE, remedy=remedy)
    return None


def _check_against_tensors(parsed: ParsedConfig, plan: AdapterPlan, refusals: Refusals) -> list[str]:
    """What the config says beside what the file holds; returns warnings, the config's own first."""
    _check_declared_tensors(parsed.config, plan.entries, refusals)
    warnings = parsed.warnings + _check_targets(parsed.config, plan.layouts, refusals)
    if plan.layouts:
        warnings += parsed.rule.unused_patterns()
    idle = [layout.name for layout in plan.layouts if layout.scaling == 0]
    return warnings + [f"{shown(name)} has the scaling 0 and adds nothing" for name in idle]


def _check_declared_tensors(config: PeftConfig, entries: list[TensorEntry], refusals: Refusals) -> None:
    names = [entry.name for entry in entries]
    for module in config.modules_to_save or ():
        if not any(f".{module}." in name for name in names):
            message = f"modules_to_save declares {shown(module)}, but {module[:80]}.weight is missing in the file"
            refusals.add("tensor_missing", message, file=WEIGHTS_FILE)
    if config.use_dora and not any("lora_magnitude_vector" in name for name in names):
        message = "use_dora is true, but every lora_magnitude_vector is missing in the file"
        refusals.add("tensor_missing", message, file=WEIGHTS_FILE)


def _check_ranks(config: PeftConfig, max_lora_rank: int, refusals: Refusals) -> None:
    """By the config alone: a tensor whose rank differs from it is refused anyway."""
    declared = {"r": config.r} | {f"rank_pattern[{shown(key)}]": rank for key, rank in config.rank_pattern.items()}
    for name, rank in declared.items():
        if rank > max_lora_rank:
            message = f"{CONFIG_FILE}: {name}: rank {shown_value(rank)} > max {max_lora_rank}"
            remedy = f"train with r <= {max_lora_rank}, or ask the operator for a larger --max-lora-rank"
            refusals.add("rank_too_large", message, file=CONFIG_FILE, remedy=remedy)


def _check_slots(attention: int, mlp: int, num_slots: int, refusals: Refusals) -> None:
    for space, num in (("attention", attention), ("MLP", mlp)):
        if num > num_slots:
            message = f"the adapter needs {num} {space} slots; this server has {num_slots}"
            refusals.add("adapter_never_fits", message, remedy="train with a smaller rank")


def _check_targets(config: PeftConfig, layouts: list[ModuleLayout], refusals: Refusals) -> list[str]:
    """The tensors decide what is adapted. A regular expression that PEFT could not load either is refused."""
    pattern = config.target_modules
    if not layouts or not isinstance(pattern, str) or pattern.lower() == "all-linear":
        return []
    try:
        regex = compile_pattern(pattern)
    except PatternError as error:
        return [f"target_modules was not compared with the tensors: it {error}"]
    unmatched = [layout.name for layout in layouts if not regex.fullmatch(layout.name)]
    if len(unmatched) == len(layouts):
        message = f"{CONFIG_FILE}: target_modules is the regular expression {shown(pattern)}, which matches no module"
        remedy = "write the names that the tensors have; PEFT could not load this adapter either"
        refusals.add("target_modules_mismatch", message, file=CONFIG_FILE, remedy=remedy)
        return []
    return [f"target_modules does not match {shown(name)}, which has tensors" for name in unmatched[:5]]


def _facts(
    root: Path, config: PeftConfig, plan: AdapterPlan, num_slots: tuple[int, int], warnings: list[str]
) -> AdapterFacts:
    modules = [
        ModuleFacts(path=spec.path, rank=layout.rank, scaling=layout.scaling)
        for layout in plan.layouts
        for spec in layout.specs
    ]
    projections = sorted({spec.projection for layout in plan.layouts for spec in layout.specs})
    return AdapterFacts(
        peft_type=config.peft_type,
        use_rslora=config.use_rslora,
        rank=max(layout.rank for layout in plan.layouts),
        modules=tuple(sorted(modules, key=lambda module: module.path)),
        target_modules=tuple(projection.module_name for projection in projections),
        num_tensors=len(plan.entries),
        num_mapped_tensors=2 * len(plan.layouts),
        dtypes=tuple(sorted({entry.dtype for entry in plan.entries})),
        num_attention_slots=num_slots[0],
        num_mlp_slots=num_slots[1],
        size_bytes=sum((root / name).stat().st_size for name in version_files(root)),
        base_model_name=config.base_model_name_or_path,
        warnings=_bounded(warnings),
    )


def _bounded(warnings: list[str]) -> tuple[str, ...]:
    num_more = len(warnings) - _MAX_WARNINGS
    return tuple(warnings[:_MAX_WARNINGS]) + ((f"and {num_more} more warnings",) if num_more > 0 else ())
