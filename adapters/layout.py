"""Which tensors of an upload make the A and B of which module, with the rank and scaling they have there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.adapters.base_spec import BaseSpec, ModuleSpec
from loraplex.adapters.peft_config import ScalingRule
from loraplex.adapters.refusals import Refusals, shown
from loraplex.adapters.safetensors_header import TensorEntry
from loraplex.adapters.tensor_names import (
    LoraTensorName,
    ModuleTarget,
    parse_lora_name,
    resolve_modules,
    unserved_feature,
    why_unmapped,
)

# Names of tensors with one row or column per token, and the axis it is.
_VOCABULARY_AXES = {
    "lora_embedding_A": 1,
    "lm_head.lora_B.weight": 0,
    "lm_head.weight": 0,
    "embed_tokens.weight": 0,
    "lm_head.base_layer.weight": 0,
    "embed_tokens.base_layer.weight": 0,
}

_OTHER_BASE = "is this an adapter of another base?"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleLayout:
    """One A/B pair. Of a fused module `specs` share A and have one part each of B's rows, in order."""

    name: str  # as the trained model called it
    specs: tuple[ModuleSpec, ...]
    lora_a: TensorEntry  # [rank, in_features]
    lora_b: TensorEntry  # [sum of out_features, rank]
    scaling: float

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


def build_layout(
    entries: Sequence[TensorEntry], rule: ScalingRule, base: BaseSpec, refusals: Refusals
) -> list[ModuleLayout]:
    """Map every tensor, or say to `refusals` why not. Pairs with a fault are left out of the result."""
    if not entries:
        refusals.add("no_lora_tensors", "there are no LoRA tensors in the file: it would answer as the base does")
    pairs = _pair(_split_names(entries, base, refusals), refusals)
    targets = resolve_modules(pairs, base)
    _refuse_unmapped(pairs, targets, base, refusals)
    layouts = []
    for module, pair in pairs.items():
        if module in targets and (layout := _module_layout(targets[module], pair, rule, refusals)) is not None:
            layouts.append(layout)
    _refuse_double_targets(layouts, refusals)
    return layouts


_Named = list[tuple[LoraTensorName, TensorEntry]]
_Pair = dict[str, TensorEntry]  # "A", "B" -> tensor


def _split_names(entries: Sequence[TensorEntry], base: BaseSpec, refusals: Refusals) -> _Named:
    named: _Named = []
    for entry in entries:
        if (name := parse_lora_name(entry.name)) is not None:
            named.append((name, entry))
        elif (feature := unserved_feature(entry.name)) is not None:
            message = f"tensor {shown(entry.name)} is {feature.what}{_vocabulary_fault(entry, base)}"
            refusals.add("tensor_unsupported", message, file=entry.file, tensor=entry.name, remedy=feature.remedy)
        else:
            message = f"tensor {shown(entry.name)} is unmapped: it is not a lora_A or lora_B weight"
            refusals.add("tensor_unmapped", message, file=entry.file, tensor=entry.name)
    return named


def _vocabulary_fault(entry: TensorEntry, base: BaseSpec) -> str:
    axis = next((axis for suffix, axis in _VOCABULARY_AXES.items() if entry.name.endswith(suffix)), None)
    if axis is None or len(entry.shape) != 2 or entry.shape[axis] == base.vocab_size:
        return ""
    return f"; besides, its vocabulary {entry.shape[axis]} != {base.vocab_size}, the base's"


def _pair(named: _Named, refusals: Refusals) -> dict[str, _Pair]:
    adapters = {name.adapter for name, _ in named}
    if len(adapters) > 1:
        listed = ", ".join(shown(str(adapter)) for adapter in sorted(adapters, key=str)[:5])
        message = f"the file mixes tensors of several adapters ({listed})"
        refusals.add("adapter_ambiguous", message, remedy="save each adapter by itself")
        return {}
    pairs: dict[str, _Pair] = {}
    for name, entry in named:
        pairs.setdefault(name.module, {})[name.part] = entry
    for module, pair in pairs.items():
        for part, other in (("A", "B"), ("B", "A")):
            if part not in pair:
                message = f"module {shown(module)} has lora_{other} but no lora_{part}"
                refusals.add("pair_incomplete", message, file=pair[other].file, tensor=pair[other].name)
    return pairs


def _refuse_unmapped(
    pairs: dict[str, _Pair], targets: dict[str, ModuleTarget], base: BaseSpec, refusals: Refusals
) -> None:
    unmapped = [(module, entry) for module, pair in pairs.items() if module not in targets for entry in pair.values()]
    if not unmapped:
        return
    num_tensors = sum(len(pair) for pair in pairs.values())
    refusals.add(
        "unmapped_tensors",
        f"{len(unmapped)} of {num_tensors} unmapped: these tensors belong to no module of {shown(base.name)}",
        remedy="train on this base's causal-LM class and save with PEFT",
    )
    for module, entry in unmapped:
        message = f"tensor {shown(entry.name)} is unmapped: {why_unmapped(module, base)}"
        refusals.add("tensor_unmapped", message, file=entry.file, tensor=entry.name)


def _module_layout(target: ModuleTarget, pair: _Pair, rule: ScalingRule, refusals: Refusals) -> ModuleLayout | None:
    if len(pair) < 2:
        return None
    lora_a, lora_b = pair["A"], pair["B"]
    fault = _shape_fault(target, lora_a, lora_b)
    if fault is not None:
        entry, message = fault
        refusals.add("tensor_shape", f"{shown(target.name)}: {message}", file=entry.file, tensor=entry.name)
        return None
    rank, expected = lora_a.shape[0], rule.rank(target.name)
    if rank != expected:
        message = f"{shown(target.name)}: the tensors have rank {rank}, adapter_config.json says {str(expected)[:20]}"
        remedy = "make r and rank_pattern say the ranks that were trained"
        refusals.add("rank_mismatch", message, file=lora_a.file, tensor=lora_a.name, remedy=remedy)
        return None
    scaling = rule.scaling(target.name, rank)
    return ModuleLayout(name=target.name, specs=target.specs, lora_a=lora_a, lora_b=lora_b, scaling=scaling)


def _shape_fault(target: ModuleTarget, lora_a: TensorEntry, lora_b: TensorEntry) -> tuple[TensorEntry, str] | None:
    in_features = target.specs[0].in_features
    out_features = sum(spec.out_features for spec in target.specs)
    for entry, part in ((lora_a, "lora_A"), (lora_b, "lora_B")):
        if len(entry.shape) != 2:
            return entry, f"{part} must be 2-D, but is {list(entry.shape)}"
    (rank_a, found_in), (found_out, rank_b) = lora_a.shape, lora_b.shape
    expected = f"expected lora_A [r, {in_features}] and lora_B [{out_features}, r]"
    found = f"found lora_A {list(lora_a.shape)} and lora_B {list(lora_b.shape)}"
    is_other = found_in != in_features or found_out != out_features
    if is_other and (rank_a, rank_b) == (in_features, out_features) and found_in == found_out:
        return lora_a, f"the tensors look transposed: {expected}, {found}"
    if found_in != in_features:
        return lora_a, f"in_features {found_in} != {in_features}: {expected}, {found}; {_OTHER_BASE}"
    if found_out != out_features:
        return lora_b, f"out_features {found_out} != {out_features}: {expected}, {found}; {_OTHER_BASE}"
    if rank_a != rank_b:
        return lora_b, f"rank mismatch: lora_A r={rank_a}, lora_B r={rank_b}"
    return None


def _refuse_double_targets(layouts: list[ModuleLayout], refusals: Refusals) -> None:
    paths = Counter(spec.path for layout in layouts for spec in layout.specs)
    for path, num in paths.items():
        if num > 1:
            refusals.add("module_twice", f"{path} has weights under a fused and under its own name")
