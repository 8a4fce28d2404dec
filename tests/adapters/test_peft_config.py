from __future__ import annotations

import json

import pytest

from loraplex.adapters.peft_config import ParsedConfig, parse_config
from loraplex.adapters.refusals import Refusals


def parse(data: bytes | dict[str, object]) -> tuple[ParsedConfig | None, str]:
    refusals = Refusals()
    raw = (
        data if isinstance(data, bytes) else json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | data).encode()
    )
    parsed = parse_config(raw, refusals)
    return parsed, "\n".join(reason.message for reason in refusals.reasons)


def parse_well(fields: dict[str, object]) -> ParsedConfig:
    parsed, faults = parse(fields)
    assert parsed is not None
    assert not faults
    return parsed


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b'{"r": 8,', "line 1, column 9"),
        (b"[1]", "must be a JSON object, not an array"),
        (b"7", "must be a JSON object, not a number"),
        (b'{"peft_type": "LORA", "r": 4, "r": 8}', "has the key 'r' twice"),
        (b'{"peft_type": "LORA", "r": 8, "lora_alpha": NaN}', "nan for 'lora_alpha'"),
        (b'{"peft_type": "LORA", "r": 8, "lora_alpha": 1e999}', "inf for 'lora_alpha'"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"a": "' + b"x" * (1 << 20) + b'"}', "at most 1048576 are allowed"),
        (b'{"a": "\xff"}', "not valid UTF-8"),
        (b'{"r": ' + b"9" * 5_000 + b"}", "number that is too long"),
    ],
)
def test_a_config_that_is_not_strict_json_is_refused_with_the_place(data: bytes, fault: str) -> None:
    parsed, faults = parse(data)
    assert parsed is None
    assert fault in faults


def test_every_field_of_a_wrong_type_is_named_at_once() -> None:
    _, faults = parse({"r": "8", "lora_alpha": [16], "use_dora": "false", "target_modules": {"q_proj": 1}})
    for name in ("field r:", "field lora_alpha:", "field use_dora:", "field target_modules:"):
        assert name in faults


def test_true_is_not_a_rank() -> None:
    assert "field r: Expected `int`, got `bool`" in parse({"r": True})[1]


@pytest.mark.parametrize("rank", [0, -8])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    assert f"r is {rank}; it must be >= 1" in parse({"r": rank})[1]
    assert "must be >= 1" in parse({"rank_pattern": {"q_proj": rank}})[1]


@pytest.mark.parametrize("field", ["r", "lora_alpha", "peft_type"])
def test_a_missing_field_that_decides_the_answer_is_named(field: str) -> None:
    _, faults = parse({field: None})
    assert field in faults


def test_alpha_beyond_float32_is_refused() -> None:
    assert "must be finite in float32" in parse({"lora_alpha": 1e300})[1]
    assert "must be finite in float32" in parse({"alpha_pattern": {"q_proj": 1e300}})[1]


@pytest.mark.parametrize("peft_type", ["VERA", "ADALORA", "IA3", "lora", "XLORA"])
def test_every_other_kind_is_refused_by_name(peft_type: str) -> None:
    assert f"peft_type '{peft_type}' is unsupported" in parse({"peft_type": peft_type})[1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("trainable_token_indices", [5, 6]),
        ("trainable_token_indices", {"embed_tokens": [5]}),
        ("alora_invocation_tokens", [1, 2]),
        ("alora_invocation_tokens", []),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "something_new"),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("kasa_config", {"beta": 1}),
        ("velora_config", {"num_groups": 32}),
        ("monteclora_config", {"num_samples": 8}),
        ("arrow_config", {"top_k": 2}),
        ("megatron_config", {"x": 1}),
        ("enable_lora", [True, False, True]),
    ],
)
def test_a_feature_that_changes_the_meaning_is_refused_by_its_field(field: str, value: object) -> None:
    refusals = Refusals()
    data = json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16, field: value}).encode()
    parse_config(data, refusals)
    [reason] = refusals.reasons
    assert field in reason.message
    assert reason.remedy


@pytest.mark.parametrize(
    "fields",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": True, "corda_config": {"corda_method": "kpm"}},
        {"bias": "all"},
        {"fan_in_fan_out": True},
        {"exclude_modules": ["lm_head"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"modules_to_save": [], "layer_replication": None, "use_dora": None},
        {"enable_lora": None, "merge_weights": False},
        {"target_parameters": ["mlp.down_proj.weight"]},
        {"lora_dropout": 0.1, "megatron_core": "megatron.core", "loftq_config": {}},
    ],
)
def test_what_is_plain_lora_at_inference_is_accepted_without_a_word(fields: dict[str, object]) -> None:
    assert parse_well(fields).warnings == []


def test_unknown_fields_are_accepted_with_a_warning() -> None:
    [warning] = parse_well({"new_field": 1}).warnings
    assert "'new_field'" in warning


@pytest.mark.parametrize(
    ("fields", "name", "rank", "scaling"),
    [
        ({}, "model.layers.0.self_attn.q_proj", 8, 2.0),
        ({"use_rslora": True}, "model.layers.0.self_attn.q_proj", 16, 4.0),
        ({"alpha_pattern": {"q_proj": 64}}, "model.layers.0.self_attn.q_proj", 16, 4.0),
        ({"alpha_pattern": {"q_proj": 64}}, "model.layers.0.self_attn.my_q_proj", 8, 2.0),
        ({"alpha_pattern": {"layers.1.mlp.down_proj": 32}}, "model.layers.1.mlp.down_proj", 8, 4.0),
        ({"alpha_pattern": {"layers.1.mlp.down_proj": 32}}, "model.layers.11.mlp.down_proj", 8, 2.0),
        ({"alpha_pattern": {r"^layers\.1\.mlp\.up_proj": 32}}, "model.layers.1.mlp.up_proj", 8, 2.0),
        ({"alpha_pattern": {r"^model\.layers\.1\.mlp\.up_proj": 32}}, "model.layers.1.mlp.up_proj", 8, 4.0),
        ({"alpha_pattern": {r"(q|k)_proj": 8, "k_proj": 64}}, "model.layers.0.self_attn.k_proj", 8, 1.0),
        ({"alpha_pattern": {"down_proj": 8, "layers.0.mlp.down_proj": 64}}, "model.layers.0.mlp.down_proj", 8, 1.0),
    ],
)
def test_scaling_follows_the_first_pattern_that_matches_the_end_of_the_name(
    fields: dict[str, object], name: str, rank: int, scaling: float
) -> None:
    assert parse_well(fields).rule.scaling(name, rank) == scaling


def test_rank_follows_the_pattern() -> None:
    rule = parse_well({"rank_pattern": {"layers.1.mlp.down_proj": 4, "q_proj": 16}}).rule
    assert rule.rank("model.layers.1.mlp.down_proj") == 4
    assert rule.rank("model.layers.0.mlp.down_proj") == 8
    assert rule.rank("model.layers.1.self_attn.q_proj") == 16


@pytest.mark.parametrize("key", ["(?=q)q_proj", r"(a)\1", "(", "q{1,100000}", "x" * 1_000])
def test_a_pattern_that_cannot_be_matched_in_linear_time_is_refused_by_name(key: str) -> None:
    parsed, faults = parse({"rank_pattern": {"k_proj": 4, key: 8}})
    assert parsed is None
    assert f"the key '{key[:3]}" in faults
    assert "'k_proj'" not in faults


def test_too_many_pattern_keys_are_refused() -> None:
    assert "at most 2048 are allowed" in parse({"alpha_pattern": {f"m{i}": 1 for i in range(3_000)}})[1]
