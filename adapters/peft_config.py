"""adapter_config.json: strict, every fault collected, nothing that changes the meaning ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal

import msgspec
import numpy as np

from loraplex.adapters.file_names import CONFIG_FILE
from loraplex.adapters.name_patterns import NamePatterns, pattern_faults
from loraplex.adapters.peft_features import check_features
from loraplex.adapters.refusals import Refusals, shown
from loraplex.adapters.strict_json import JsonError, JsonObject, parse_json_object

MAX_CONFIG_BYTES: Final = 1 << 20
MAX_PATTERN_KEYS: Final = 2_048

# Of no effect on what the adapter computes: how it was trained, or where it came from.
_HARMLESS_KEYS: Final = frozenset(
    (
        "auto_mapping",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "merge_weights",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
    )
)


class PeftConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that matter to serving. A null in the file means the default."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    fan_in_fan_out: bool = False
    init_lora_weights: bool | str = True
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    # Not served yet, refused by `check_features`.
    use_dora: bool = False
    lora_bias: bool = False
    use_qalora: bool = False
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    alora_invocation_tokens: list[int] | None = None
    layer_replication: list[list[int]] | None = None
    enable_lora: list[bool] | None = None
    use_bdlora: bool | JsonObject | None = None
    arrow_config: JsonObject | None = None
    kasa_config: JsonObject | None = None
    megatron_config: JsonObject | None = None
    monteclora_config: JsonObject | None = None
    velora_config: JsonObject | None = None


class ScalingRule:
    """Rank and scaling of a module by the config, as PEFT decides them."""

    def __init__(self, config: PeftConfig) -> None:
        self._config = config
        self._rank_patterns = NamePatterns(config.rank_pattern)
        self._alpha_patterns = NamePatterns(config.alpha_pattern)

    def rank(self, module_name: str) -> int:
        key = self._rank_patterns.first_match(module_name)
        return self._config.r if key is None else self._config.rank_pattern[key]

    def scaling(self, module_name: str, rank: int) -> float:
        """alpha / r, or alpha / sqrt(r) for rsLoRA, as a float32 value."""
        key = self._alpha_patterns.first_match(module_name)
        alpha = self._config.lora_alpha if key is None else self._config.alpha_pattern[key]
        return float(np.float32(alpha / (math.sqrt(rank) if self._config.use_rslora else rank)))

    def unused_patterns(self) -> list[str]:
        """Warnings about keys that decided about no module so far; PEFT ignores them too."""
        return [
            f"{CONFIG_FILE}: the key {shown(key)} of {field} decides about no module and was ignored"
            for field, patterns in (("rank_pattern", self._rank_patterns), ("alpha_pattern", self._alpha_patterns))
            for key in patterns.unused
        ]


class ParsedConfig(msgspec.Struct, frozen=True):
    config: PeftConfig
    rule: ScalingRule
    warnings: list[str]


def parse_config(data: bytes, refusals: Refusals) -> ParsedConfig | None:
    """Read the bytes of adapter_config.json; what is wrong goes to `refusals`, None if nothing can be built on it."""
    try:
        fields = parse_json_object(data, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        refusals.add("config_invalid", f"{CONFIG_FILE} {error}", file=CONFIG_FILE)
        return None
    if not _check_peft_type(fields, refusals):
        return None
    config = _convert(fields, refusals)
    if config is None:
        return None
    check_features(config, refusals)
    _check_numbers(config, refusals)
    rule = _compile_rule(config, refusals)
    return None if rule is None else ParsedConfig(config, rule, _warnings(config, fields))


def _check_peft_type(fields: JsonObject, refusals: Refusals) -> bool:
    peft_type = fields.get("peft_type")
    if peft_type == "LORA":
        return True
    given = "is missing" if peft_type is None else f"{shown(str(peft_type))} is unsupported"
    refusals.add(
        "peft_type_unsupported",
        f"{CONFIG_FILE}: peft_type {given}; only LORA is served",
        file=CONFIG_FILE,
        remedy="train a LoRA adapter, or convert this one to LoRA",
    )
    return False


def _convert(fields: JsonObject, refusals: Refusals) -> PeftConfig | None:
    """Each field by itself, so that every wrong type is told at once."""
    values: dict[str, object] = {}
    num_wrong = 0
    for field in msgspec.structs.fields(PeftConfig):
        value = fields.get(field.name)
        try:
            if value is not None:
                values[field.name] = msgspec.convert(value, field.type, strict=True)
            elif field.required:
                raise msgspec.ValidationError("is required")
        except msgspec.ValidationError as error:
            num_wrong += 1
            message = f"{CONFIG_FILE}: field {field.name}: {str(error)[:200]}"
            refusals.add("config_field", message, file=CONFIG_FILE, remedy="write the type that PEFT writes")
    return None if num_wrong else msgspec.convert(values, PeftConfig)


def _check_numbers(config: PeftConfig, refusals: Refusals) -> None:
    for name, rank in {"r": config.r, **_named("rank_pattern", config.rank_pattern)}.items():
        if rank < 1:
            refusals.add("config_field", f"{CONFIG_FILE}: {name} is {rank}; it must be >= 1", file=CONFIG_FILE)
    for name, alpha in {"lora_alpha": config.lora_alpha, **_named("alpha_pattern", config.alpha_pattern)}.items():
        if not abs(alpha) <= float(np.finfo(np.float32).max):
            message = f"{CONFIG_FILE}: {name} is {alpha}; it must be finite in float32"
            refusals.add("config_field", message, file=CONFIG_FILE)


def _named(field: str, pattern: Mapping[str, float]) -> dict[str, float]:
    return {f"{field}[{shown(key)}]": value for key, value in pattern.items()}


def _compile_rule(config: PeftConfig, refusals: Refusals) -> ScalingRule | None:
    num_keys = max(len(config.rank_pattern), len(config.alpha_pattern))
    if num_keys > MAX_PATTERN_KEYS:
        message = f"{CONFIG_FILE}: a pattern has {num_keys} keys; at most {MAX_PATTERN_KEYS} are allowed"
        refusals.add("config_pattern", message, file=CONFIG_FILE)
        return None
    is_sound = True
    for field, keys in (("rank_pattern", config.rank_pattern), ("alpha_pattern", config.alpha_pattern)):
        for key, fault in pattern_faults(keys).items():
            is_sound = False
            message = f"{CONFIG_FILE}: the key {shown(key)} of {field} {fault}"
            remedy = "write the module's name, or a simpler regular expression"
            refusals.add("config_pattern", message, file=CONFIG_FILE, remedy=remedy)
    return ScalingRule(config) if is_sound else None


def _warnings(config: PeftConfig, fields: JsonObject) -> list[str]:
    known = {field.name for field in msgspec.structs.fields(PeftConfig)} | _HARMLESS_KEYS
    unknown = [shown(name) for name in sorted(fields.keys() - known)]
    warnings = []
    if unknown:
        names = ", ".join(unknown[:20]) + (f" and {len(unknown) - 20} more" if len(unknown) > 20 else "")
        warnings.append(f"{CONFIG_FILE}: unknown fields were ignored: {names}")
    if config.task_type not in (None, "CAUSAL_LM"):
        warnings.append(f"{CONFIG_FILE}: task_type is {shown(config.task_type)}; it is served as CAUSAL_LM")
    return warnings
