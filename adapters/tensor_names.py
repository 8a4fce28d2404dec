"""From the names that tensors have in an upload to modules of the base."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, NamedTuple

from loraplex.adapters.base_spec import BaseSpec, ModuleSpec
from loraplex.adapters.refusals import shown
from loraplex.kernels.lora.metadata import Projection

# How a module may be written, as (what is stripped, what is put before the rest): PEFT's own prefix; none;
# and both again for adapters trained on the model without its head, whose names lack "model.".
_DIALECTS: Final = (("base_model.model.", ""), ("", ""), ("base_model.model.", "model."), ("", "model."))

_LORA_NAME: Final = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.(?P<adapter>[^.]+))?\.weight")

_FUSED: Final = {
    "self_attn.qkv_proj": (Projection.Q, Projection.K, Projection.V),
    "mlp.gate_up_proj": (Projection.GATE, Projection.UP),
}


class UnservedFeature(NamedTuple):
    """Why a tensor is not served, and what to do."""

    what: str
    remedy: str


_LINEAR_ONLY: Final = "train with LoRA on the linear layers of the decoder only"

# Tensors of features that are not served yet, told by their names; the first match counts.
_UNSERVED: Final = tuple(
    (re.compile(pattern), UnservedFeature(what, remedy))
    for pattern, what, remedy in (
        (
            r"\.lora_magnitude_vector",
            "a magnitude vector of DoRA (use_dora), which is not served yet",
            "train with use_dora=False",
        ),
        (
            r"\.lora_B(\..+)?\.bias$",
            "a bias of lora_B (lora_bias), which is not served yet",
            "train with lora_bias=False",
        ),
        (
            r"\.lora_embedding_[AB]",
            "LoRA on embed_tokens (target_modules), which is not served yet",
            f"leave embed_tokens out of target_modules; {_LINEAR_ONLY}",
        ),
        (
            r"(^|\.)lm_head\.lora_[AB]\.",
            "LoRA on lm_head (target_modules), which is not served yet",
            f"leave lm_head out of target_modules; {_LINEAR_ONLY}",
        ),
        (
            r"\.token_adapter\.",
            "trained token rows (trainable_token_indices), which are not served yet",
            "train without trainable_token_indices",
        ),
        (r"\.lora_(velora|monteclora|diag)", "an extra of a LoRA variant that is not served yet", "train a plain LoRA"),
        (r"\.base_layer\.weight$", "a copy of the base's own weights", "save with save_embedding_layers=False"),
        (r"\.bias$", "a trained bias of the base (bias), which is not served yet", 'train with bias="none"'),
        (
            r"(lm_head|embed_tokens)\.weight$",
            "a whole matrix (modules_to_save or a resized vocabulary), not served yet",
            f"train without modules_to_save and with the base's own vocabulary; {_LINEAR_ONLY}",
        ),
        (r"norm[^.]*\.weight$", "a trained norm (modules_to_save), which is not served yet", _LINEAR_ONLY),
        (r"\.lora_[ab]$", "named as MLX does", "convert the adapter to PEFT's names and layout"),
    )
)


class LoraTensorName(NamedTuple):
    """A plain LoRA weight's name in its parts."""

    module: str  # as written, with the dialect's prefix
    part: str  # "A" or "B"
    adapter: str | None  # "default" in `lora_A.default.weight`


def parse_lora_name(name: str) -> LoraTensorName | None:
    """The parts of a name such as `base_model.model.<path>.lora_A.weight`; None when it is no plain LoRA weight."""
    match = _LORA_NAME.fullmatch(name)
    if match is None or unserved_feature(name) is not None:
        return None
    return LoraTensorName(match["module"], match["part"], match["adapter"])


def unserved_feature(name: str) -> UnservedFeature | None:
    """The feature not served yet that a tensor belongs to; None for every other tensor."""
    return next((feature for pattern, feature in _UNSERVED if pattern.search(name)), None)


class ModuleTarget(NamedTuple):
    """A module of the upload found in the base."""

    name: str  # as the trained model called it: what PEFT matches patterns against
    specs: tuple[ModuleSpec, ...]  # several for a fused module, in the order of lora_B's rows


def resolve_modules(modules: Collection[str], base: BaseSpec) -> dict[str, ModuleTarget]:
    """Find the written names in the base by the one dialect that finds most of them; absent = not found."""
    targets = _targets_by_path(base)
    resolved = [_resolve(modules, prefix, missing, targets) for prefix, missing in _DIALECTS]
    return max(resolved, key=len)


def why_unmapped(module: str, base: BaseSpec) -> str:
    """What is wrong with a written module name that is not in the base."""
    layer = re.search(r"(?:^|\.)layers\.(\d{1,9})\.", module)
    if layer is not None and int(layer[1]) >= base.num_layers:
        return f"layer {layer[1]} is not in the base, whose layers are 0 to {base.num_layers - 1}"
    last = module.rpartition(".")[2]
    known = {projection.module_name for projection in Projection} | {"qkv_proj", "gate_up_proj"}
    if last not in known:
        return f"unknown module {shown(last)}; served are {', '.join(sorted(known))} of the decoder layers"
    return "the base has no module of that path; was the adapter trained on another class of this model?"


def _resolve(
    modules: Collection[str], prefix: str, missing: str, targets: dict[str, tuple[ModuleSpec, ...]]
) -> dict[str, ModuleTarget]:
    resolved = {}
    for module in modules:
        name = module.removeprefix(prefix)
        specs = targets.get(missing + name)
        if module.startswith(prefix) and specs is not None:
            resolved[module] = ModuleTarget(name, specs)
    return resolved


def _targets_by_path(base: BaseSpec) -> dict[str, tuple[ModuleSpec, ...]]:
    targets: dict[str, tuple[ModuleSpec, ...]] = {spec.path: (spec,) for spec in base.modules()}
    for layer in range(base.num_layers):
        for path, projections in _FUSED.items():
            specs = tuple(base.module(layer, projection) for projection in projections)
            targets[f"model.layers.{layer}.{path}"] = specs
    return targets
