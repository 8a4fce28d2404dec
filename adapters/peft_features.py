"""Features of PEFT's LoRA that change what an adapter computes and are not served yet: refused by field name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from loraplex.adapters.file_names import CONFIG_FILE
from loraplex.adapters.refusals import Refusals, shown_value

if TYPE_CHECKING:
    from loraplex.adapters.peft_config import PeftConfig

# Initialisations that leave the base's weights as they are; the trained A and B are plain LoRA.
_PLAIN_INITS: Final = frozenset({"gaussian", "orthogonal", "mica", "eva"})

_CONVERT_REMEDY: Final = (
    "save it converted: model.save_pretrained(folder, path_initial_model_for_weight_conversion=...), "
    "which writes a plain LoRA of twice the rank with init_lora_weights = true"
)


class _Feature(NamedTuple):
    field: str
    what: str
    remedy: str


_FEATURES: Final = (
    _Feature("use_dora", "DoRA is not served yet", "train with use_dora=False"),
    _Feature("lora_bias", "biases on lora_B are not served yet", "train with lora_bias=False"),
    _Feature(
        "modules_to_save",
        "fully trained modules are not served yet",
        "train without modules_to_save, with LoRA on the linear layers only",
    ),
    _Feature(
        "trainable_token_indices",
        "trained token rows are not served yet",
        "train without trainable_token_indices",
    ),
    _Feature("layer_replication", "replicated layers are not served", "train on the base's own layers"),
    _Feature("use_qalora", "QALoRA is not served", "train a plain LoRA"),
    _Feature("use_bdlora", "block-diagonal LoRA is not served yet", "train a plain LoRA"),
    _Feature("kasa_config", "KaSA is not served yet", "train a plain LoRA"),
    _Feature("velora_config", "VeLoRA's extra tensors are not served yet", "remove velora_config and its tensors"),
    _Feature("monteclora_config", "MonteCLoRA's extra tensors are not served yet", "train a plain LoRA"),
    _Feature("arrow_config", "Arrow routing is not served", "upload the experts as adapters of their own"),
    _Feature("megatron_config", "Megatron's parallel layers are not served", "export a plain PEFT adapter"),
    _Feature("enable_lora", "merged linear layers of 2023 are not served", "train with a current PEFT"),
)


def check_features(config: PeftConfig, refusals: Refusals) -> None:
    for feature in _FEATURES:
        if value := getattr(config, feature.field):
            _refuse(feature.field, value, feature.what, feature.remedy, refusals)
    _check_alora(config, refusals)
    _check_init(config, refusals)
    if config.target_parameters and (config.rank_pattern or config.alpha_pattern):
        what = "patterns together with target_parameters are not served"
        remedy = "train with target_modules instead"
        _refuse("target_parameters", config.target_parameters, what, remedy, refusals)


def _check_alora(config: PeftConfig, refusals: Refusals) -> None:
    tokens = config.alora_invocation_tokens
    if tokens is None:
        return
    what = "activated LoRA is not served yet" if tokens else "an empty list switches activated LoRA on and never starts"
    remedy = "train without alora_invocation_tokens"
    _refuse("alora_invocation_tokens", tokens, what, remedy, refusals)


def _check_init(config: PeftConfig, refusals: Refusals) -> None:
    init = config.init_lora_weights
    if isinstance(init, bool) or init.lower() in _PLAIN_INITS:
        return
    what = "this initialisation changed the base's weights in training, so A and B alone are not the adapter"
    _refuse("init_lora_weights", init, what, _CONVERT_REMEDY, refusals)


def _refuse(field: str, value: object, what: str, remedy: str, refusals: Refusals) -> None:
    message = f"{CONFIG_FILE}: {field} = {shown_value(value)}: {what}"
    refusals.add("feature_unsupported", message, file=CONFIG_FILE, remedy=remedy)
