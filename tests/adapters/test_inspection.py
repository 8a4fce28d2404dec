"""What must be in the folder: cases of real servers that loaded it wrongly or silently answered as the base."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.inspection import AdapterFacts
from loraplex.kernels.lora.metadata import Projection
from tests.adapters.helpers import (
    BASE,
    QV,
    Array,
    inspect,
    lora_tensors,
    make_base_spec,
    messages,
    refusal,
    write_adapter,
)

Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def renamed(old: str, new: str, tensors: dict[str, Array] | None = None) -> dict[str, Array]:
    return {name.replace(old, new): value for name, value in (tensors or lora_tensors()).items()}


def test_a_plain_adapter_passes_with_its_facts(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, base_model_name_or_path="org/tiny")
    facts = inspect(folder, slot_rank=4)
    assert (facts.num_tensors, facts.num_mapped_tensors) == (28, 28)
    assert (facts.rank, facts.num_attention_slots, facts.num_mlp_slots) == (8, 2, 2)
    assert facts.dtypes == ("F32",)
    assert facts.target_modules == tuple(projection.module_name for projection in Projection)
    assert {(module.rank, module.scaling) for module in facts.modules} == {(8, 2.0)}
    assert facts.size_bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert msgspec.json.decode(msgspec.json.encode(facts), type=AdapterFacts) == facts


def test_an_adapter_of_attention_takes_no_mlp_slot(tmp_path: Path) -> None:
    facts = inspect(write_adapter(tmp_path, lora_tensors(projections=QV)), slot_rank=4)
    assert (facts.num_attention_slots, facts.num_mlp_slots) == (2, 0)


def test_no_tensor_that_meets_a_module_is_a_refusal_with_the_count(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, renamed("model.layers", "model.language_model.layers"))
    reasons = refusal(lambda: inspect(folder))
    assert "28 of 28 unmapped" in messages(reasons)
    assert sum(reason.tensor is not None for reason in reasons) == 20  # the rest is counted


@pytest.mark.parametrize(("to", "why"), [("layers.x1", "no module of that path"), ("layers.99", "layers are 0 to 1")])
def test_half_an_adapter_that_maps_is_a_refusal(tmp_path: Path, to: str, why: str) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, renamed("layers.1", to)))))
    assert "14 of 28 unmapped" in text
    assert why in text


def test_an_unknown_module_is_named(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, renamed("q_proj", "foo_proj")))))
    assert "unknown module 'foo_proj'" in text


def test_an_adapter_of_another_width_is_refused_with_both_shapes(tmp_path: Path) -> None:
    tensors = {
        name: np.ascontiguousarray(value[:, : value.shape[1] // 2] if "lora_A" in name else value[: len(value) // 2])
        for name, value in lora_tensors().items()
    }
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, tensors))))
    assert "in_features 64 != 128: expected lora_A [r, 128] and lora_B [128, r], found lora_A [8, 64]" in text


def test_a_transposed_adapter_is_recognised(tmp_path: Path) -> None:
    tensors = {name: np.ascontiguousarray(value.T) for name, value in lora_tensors().items()}
    assert "look transposed" in messages(refusal(lambda: inspect(write_adapter(tmp_path, tensors))))


def test_square_pairs_are_not_mistaken_for_transposed_ones(tmp_path: Path) -> None:
    base = make_base_spec(hidden=8, kv=8, intermediate=8)
    assert inspect(write_adapter(tmp_path, lora_tensors(base=base)), base=base).num_mapped_tensors == 28


def test_tensors_of_more_dimensions_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors() | {f"{Q0}.lora_A.weight": np.zeros((8, 8, 16), np.float32)}
    assert "lora_A must be 2-D, but is [8, 8, 16]" in messages(
        refusal(lambda: inspect(write_adapter(tmp_path, tensors)))
    )


def test_a_config_that_lies_about_the_rank_is_refused(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, r=4))))
    assert "the tensors have rank 8, adapter_config.json says 4" in text


def test_one_module_of_another_rank_without_a_pattern_is_refused(tmp_path: Path) -> None:
    tensors = lora_tensors()
    tensors[f"{Q0}.lora_A.weight"] = np.zeros((16, 128), np.float32)
    tensors[f"{Q0}.lora_B.weight"] = np.zeros((128, 16), np.float32)
    [reason] = refusal(lambda: inspect(write_adapter(tmp_path, tensors)))
    assert "'model.layers.0.self_attn.q_proj': the tensors have rank 16" in reason.message
    assert reason.tensor == f"{Q0}.lora_A.weight"


def test_a_and_b_of_different_rank_are_refused(tmp_path: Path) -> None:
    tensors = lora_tensors() | {f"{Q0}.lora_B.weight": np.zeros((128, 4), np.float32)}
    [reason] = refusal(lambda: inspect(write_adapter(tmp_path, tensors)))
    assert "rank mismatch: lora_A r=8, lora_B r=4" in reason.message


@pytest.mark.parametrize("part", ["A", "B"])
def test_half_a_pair_is_refused(tmp_path: Path, part: str) -> None:
    tensors = lora_tensors()
    del tensors[f"{Q0}.lora_{part}.weight"]
    [reason] = refusal(lambda: inspect(write_adapter(tmp_path, tensors)))
    assert f"no lora_{part}" in reason.message


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    assert "no LoRA tensors" in messages(refusal(lambda: inspect(write_adapter(tmp_path, {}))))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".weight", ".default.weight"),
        ("base_model.model.", ""),
        ("base_model.model.model.", "base_model.model."),
        ("base_model.model.model.", ""),
    ],
    ids=["default", "no prefix", "without head", "without head and prefix"],
)
def test_key_dialects_are_normalised(tmp_path: Path, old: str, new: str) -> None:
    plain = inspect(write_adapter(tmp_path / "plain"))
    folder = write_adapter(tmp_path / "dialect", renamed(old, new))
    assert inspect(folder).modules == plain.modules
    ours, theirs = load_weights(folder, BASE), load_weights(tmp_path / "plain", BASE)
    assert torch.equal(ours.scaling, theirs.scaling)
    for one, other in zip(ours.modules, theirs.modules, strict=True):
        assert (one.layer, one.projection) == (other.layer, other.projection)
        assert torch.equal(one.lora_a, other.lora_a)
        assert torch.equal(one.lora_b, other.lora_b)


def test_mixed_dialects_are_refused(tmp_path: Path) -> None:
    tensors = renamed("base_model.model.model.layers.1", "model.layers.1")
    assert "14 of 28 unmapped" in messages(refusal(lambda: inspect(write_adapter(tmp_path, tensors))))


def test_two_adapters_in_one_file_are_refused(tmp_path: Path) -> None:
    tensors = renamed(".weight", ".a.weight") | renamed(".weight", ".b.weight")
    assert "several adapters ('a', 'b')" in messages(refusal(lambda: inspect(write_adapter(tmp_path, tensors))))


def test_the_layout_of_mlx_is_named(tmp_path: Path) -> None:
    tensors = {
        name.replace("lora_A.weight", "lora_a").replace("lora_B.weight", "lora_b"): np.ascontiguousarray(value.T)
        for name, value in lora_tensors().items()
    }
    assert "MLX" in messages(refusal(lambda: inspect(write_adapter(tmp_path, tensors))))


def test_one_nested_folder_is_the_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "tenantA")
    assert inspect(tmp_path).num_mapped_tensors == 28


@pytest.mark.parametrize(
    ("name", "shape", "fault"),
    [
        (f"{Q0}.lora_magnitude_vector", (128,), "use_dora"),
        (f"{Q0}.lora_B.bias", (128,), "lora_bias"),
        (f"{Q0}.base_layer.bias", (128,), "bias"),
        (f"{Q0}.base_layer.weight", (128, 128), "a copy of the base's own weights"),
        ("base_model.model.lm_head.weight", (128, 128), "modules_to_save"),
        ("base_model.model.lm_head.base_layer.weight", (128, 128), "a copy of the base's own weights"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (8, 128), "embed_tokens"),
        ("base_model.model.lm_head.lora_A.weight", (8, 128), "LoRA on lm_head"),
        ("base_model.model.lm_head.lora_B.weight", (132, 8), "vocabulary 132 != 128"),
        ("base_model.model.model.embed_tokens.weight", (132, 128), "vocabulary 132 != 128"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (8, 132), "vocabulary 132 != 128"),
        ("base_model.model.model.norm.weight", (128,), "norm"),
        (
            "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta",
            (2, 128),
            "trainable_token_indices",
        ),
        (f"{Q0}.lora_velora_embed", (8,), "LoRA variant"),
        ("some.other.tensor", (1,), "unmapped"),
    ],
)
def test_a_tensor_of_a_feature_not_served_is_named(
    tmp_path: Path, name: str, shape: tuple[int, ...], fault: str
) -> None:
    folder = write_adapter(tmp_path, lora_tensors() | {name: np.zeros(shape, np.float32)})
    [reason] = refusal(lambda: inspect(folder))
    assert reason.tensor == name
    assert fault in reason.message
    assert reason.remedy or name == "some.other.tensor"


def test_bias_all_without_bias_tensors_is_harmless(tmp_path: Path) -> None:
    assert inspect(write_adapter(tmp_path, bias="all")).num_mapped_tensors == 28


def test_declared_tensors_that_are_missing_are_named(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, modules_to_save=["lm_head"], use_dora=True))))
    assert "modules_to_save declares 'lm_head', but lm_head.weight is missing" in text
    assert "lora_magnitude_vector is missing" in text


def test_everything_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    tensors = renamed("layers.1", "layers.9") | {f"{Q0}.lora_B.weight": np.zeros((128, 4), np.float32)}
    reasons = refusal(lambda: inspect(write_adapter(tmp_path, tensors, use_qalora=True, lora_bias=True)))
    assert {reason.code for reason in reasons} == {
        "feature_unsupported",
        "unmapped_tensors",
        "tensor_unmapped",
        "tensor_shape",
    }
    assert sum(reason.code == "feature_unsupported" for reason in reasons) == 2


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"r": 64}, "64"),
        ({"r": 33}, "33"),
        ({"r": 8, "rank_pattern": {"q_proj": 64}}, "64"),
        ({"r": 100_000}, "100000"),
        ({"r": 10**400}, "10"),
    ],
    ids=["double", "limit + 1", "pattern", "huge", "beyond every integer"],
)
def test_a_rank_above_the_limit_is_refused_with_both_numbers(
    tmp_path: Path, config: dict[str, object], rank: str
) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, **config), max_lora_rank=32)))
    assert f"rank {rank}" in text
    assert "> max 32" in text


def test_the_largest_allowed_rank_passes(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, lora_tensors(rank=33), r=33)
    facts = inspect(folder, max_lora_rank=33)
    assert (facts.rank, facts.num_attention_slots) == (33, 5)


def test_more_slots_than_the_server_has_are_refused_with_both_numbers(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path), slot_rank=2, num_slots=3)))
    assert "needs 4 attention slots; this server has 3" in text


@pytest.mark.parametrize(
    "targets", ["all-linear", r".*\.(q|v)_proj", ["feed_forward.gate_proj"], ["q"], None, "(?!x).*"]
)
def test_the_tensors_decide_and_target_modules_is_a_hint(tmp_path: Path, targets: object) -> None:
    assert (
        inspect(write_adapter(tmp_path, lora_tensors(projections=QV), target_modules=targets)).num_mapped_tensors == 8
    )


def test_a_regular_expression_that_matches_nothing_is_refused_as_peft_does(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(write_adapter(tmp_path, target_modules="(a+)+$"))))
    assert "target_modules is the regular expression '(a+)+$', which matches no module" in text


def test_a_pattern_that_matches_nothing_is_ignored_with_a_warning(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, rank_pattern={"gate": 4}, alpha_pattern={"q_proj": 8})
    assert [warning for warning in inspect(folder).warnings if "'gate'" in warning]
    assert not [warning for warning in inspect(folder).warnings if "'q_proj'" in warning]


def test_an_adapter_that_adds_nothing_is_told(tmp_path: Path) -> None:
    warnings = inspect(write_adapter(tmp_path, alpha_pattern={"q_proj": 0})).warnings
    assert sum("scaling 0" in warning for warning in warnings) == BASE.num_layers


def test_warnings_are_bounded(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    for index in range(60):
        (folder / f"notes-{index}.txt").touch()
    warnings = inspect(folder).warnings
    assert len(warnings) == 51
    assert warnings[-1] == "and 10 more warnings"


def test_fused_and_split_weights_of_one_module_are_refused(tmp_path: Path) -> None:
    fused = "base_model.model.model.layers.0.self_attn.qkv_proj"
    extra = {
        f"{fused}.lora_A.weight": np.zeros((8, 128), np.float32),
        f"{fused}.lora_B.weight": np.zeros((256, 8), np.float32),
    }
    assert "under a fused and under its own name" in messages(
        refusal(lambda: inspect(write_adapter(tmp_path, lora_tensors() | extra)))
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("added_tokens.json", {"<new>": 131, "<old>": 5}),
        ("tokenizer.json", {"added_tokens": [{"id": 131, "content": "<new>"}], "model": {"vocab": {"a": 0}}}),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "<new>": 131}}}),
    ],
)
def test_new_tokens_are_refused_with_the_ids(tmp_path: Path, name: str, content: object) -> None:
    folder = write_adapter(tmp_path)
    (folder / name).write_text(json.dumps(content))
    [reason] = refusal(lambda: inspect(folder))
    assert reason.file == name
    assert "beyond the base's vocabulary of 128: '<new>' = 131" in reason.message


def test_a_tokenizer_within_the_vocabulary_is_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    (folder / "added_tokens.json").write_text('{"<old>": 127}')
    (folder / "tokenizer.json").write_text("not json")
    warnings = inspect(folder).warnings
    assert any("'added_tokens.json'" in warning for warning in warnings)
    assert any("tokenizer.json was not checked" in warning for warning in warnings)


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> Path:
    tensors = lora_tensors()
    names = sorted(tensors)
    files = {f"adapter_model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    full_map = {name: file for file, members in files.items() for name in members}
    index = {"metadata": {}, "weight_map": full_map | (weight_map or {})}
    (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_one_adapter(tmp_path: Path) -> None:
    assert inspect(write_shards(tmp_path / "shards")).modules == inspect(write_adapter(tmp_path / "one")).modules


@pytest.mark.parametrize(
    ("weight_map", "fault"),
    [
        ({"x": "../../../etc/passwd"}, "not a plain shard file name"),
        ({"x": "adapter_model-00003-of-00003.safetensors"}, "which is missing"),
        ({"x": "adapter_model-00001-of-00002.safetensors"}, "tensor 'x' is declared by the index, but not in"),
        ({f"{Q0}.lora_A.weight": "adapter_model-00001-of-00002.safetensors"}, "not declared by the index"),
    ],
)
def test_an_index_that_does_not_fit_the_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, str], fault: str
) -> None:
    folder = write_shards(tmp_path)
    if fault.startswith("not declared"):
        index = json.loads((folder / "adapter_model.safetensors.index.json").read_text())
        del index["weight_map"][f"{Q0}.lora_A.weight"]
        (folder / "adapter_model.safetensors.index.json").write_text(json.dumps(index))
    else:
        write_shards(folder, weight_map)
    assert fault in messages(refusal(lambda: inspect(folder)))


def test_shards_without_their_index_and_weights_twice_are_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path)
    save_file(lora_tensors(), folder / "adapter_model.safetensors")
    assert "which ones count?" in messages(refusal(lambda: inspect(folder)))
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors.index.json").unlink()
    assert "index.json is missing beside the shards" in messages(refusal(lambda: inspect(folder)))


@pytest.mark.parametrize("name", ["adapter_model.bin", "adapter_model.pt", "adapter_model.pkl"])
def test_a_pickle_is_refused_and_never_opened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / name)
    opened: list[str] = []

    def recording(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: object, *args: object, **kwargs: object) -> object:
            opened.append(str(file))
            return function(file, *args, **kwargs)

        return call

    monkeypatch.setattr(builtins, "open", recording(builtins.open))
    monkeypatch.setattr(os, "open", recording(os.open))
    reasons = refusal(lambda: inspect(folder))
    assert reasons[0].code == "pickle_refused"
    assert any(path.endswith("adapter_config.json") for path in opened)
    assert not any(path.endswith(name) for path in opened)


def test_a_pickle_under_a_safetensors_name_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    folder = write_adapter(tmp_path / "a")
    code = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    (folder / "adapter_model.safetensors").write_bytes(b"\x80\x02" + code)
    assert "not safetensors" in messages(refusal(lambda: inspect(folder)))
    assert not marker.exists()


def test_other_pickles_beside_good_weights_are_ignored_in_a_local_folder(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path)
    (folder / "training_args.bin").write_bytes(b"x")
    assert any("training_args.bin" in warning for warning in inspect(folder).warnings)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_link_in_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert "symbolic link" in messages(refusal(lambda: inspect(folder)))


def test_missing_files_are_named(tmp_path: Path) -> None:
    text = messages(refusal(lambda: inspect(tmp_path)))
    assert "adapter_config.json is missing" in text
    assert "adapter_model.safetensors is missing" in text
    assert "is not a folder" in messages(refusal(lambda: inspect(tmp_path / "nowhere")))


def test_the_module_paths_are_those_of_the_base(tmp_path: Path) -> None:
    paths = {module.path for module in inspect(write_adapter(tmp_path)).modules}
    assert paths == {module.path for module in BASE.modules()}
