"""Strict loading: every tensor in its place and shape, or one error that lists what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.models.dtypes import resolve_dtype
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.engine.models.resolve import resolve_model
from loraplex.kernels.dispatch import PreparedLinear, RowSource
from loraplex.kernels.lora.metadata import Projection
from loraplex.kernels.reference import ReferenceBackend
from tests.engine.models.helpers import CPU, PagedRunner, edit_config, load, prompt, save_checkpoint

Q_WEIGHT = "model.layers.0.self_attn.q_proj.weight"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Apply `change` to the tensors of `model.safetensors`."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def shard(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    weight_map = {name: f"model-0000{index % 2 + 1}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    return folder


def logits(folder: Path) -> Tensor:
    return PagedRunner(load(folder), [prompt(20)]).run(20)[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "base", "llama", num_hidden_layers=2)


def test_shards_are_the_same_model(folder: Path) -> None:
    single = logits(folder)
    assert torch.equal(logits(shard(folder)), single)


def test_derived_tensors_of_old_exports_are_tolerated(folder: Path) -> None:
    def add_derived(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_config(folder, tie_word_embeddings=True)
    rewrite(folder, _drop_head)
    expected = logits(folder)
    assert torch.equal(logits(rewrite(folder, add_derived)), expected)


def _drop_head(tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def _drop_q(tensors: dict[str, Tensor]) -> None:
    del tensors[Q_WEIGHT]


def _halve_q(tensors: dict[str, Tensor]) -> None:
    tensors[Q_WEIGHT] = tensors[Q_WEIGHT][:48]


def _add_bias(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(96)


def _add_layer(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.input_layernorm.weight"] = torch.zeros(96)


def _quantize(tensors: dict[str, Tensor]) -> None:
    tensors[Q_WEIGHT] = tensors[Q_WEIGHT].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop_q, f"{Q_WEIGHT} is missing"),
        (_halve_q, f"{Q_WEIGHT} has shape [48, 96], config.json says [96, 96]"),
        (_add_bias, "q_proj.bias is not a tensor of a llama decoder"),
        (_add_layer, "model.layers.2.input_layernorm.weight is not a tensor"),
        (_quantize, f"{Q_WEIGHT} has dtype I8; supported are F64, F32, F16, BF16"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    folder: Path, change: Callable[[dict[str, Tensor]], None], message: str
) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        load(rewrite(folder, change))
    assert message in str(refusal.value)


def test_every_fault_is_listed(folder: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        for projection in ("q", "k", "v", "o"):
            del tensors[f"model.layers.0.self_attn.{projection}_proj.weight"]
        for name in ("x", "y", "z"):
            tensors[name] = torch.zeros(1)

    with pytest.raises(ConfigurationError, match=r"q_proj.*k_proj.*v_proj.*o_proj.*x is not.*and 2 more"):
        load(rewrite(folder, spoil))


def test_an_untied_head_must_be_there(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight is missing"):
        load(rewrite(folder, _drop_head))


def test_a_folder_without_safetensors_is_refused_and_its_pickle_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="only safetensors are served"):
        load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "model.bin", "a/b.safetensors"])
def test_an_index_that_leaves_the_folder_is_refused(folder: Path, name: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(ConfigurationError, match="only plain"):
        load(folder)


def test_a_shard_that_is_missing_is_named(folder: Path) -> None:
    (shard(folder) / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        load(folder)


@pytest.mark.parametrize("length", [0, 4, 500, -100])
def test_a_file_that_is_cut_short_is_refused(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ConfigurationError, match=r"not a safetensors file|cut short"):
        load(folder)


def test_a_header_that_lies_about_sizes_is_refused(folder: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ConfigurationError, match="damaged: x has 4 bytes"):
        load(folder)


def test_every_weight_passes_once_through_the_backend(folder: Path) -> None:
    class CountingBackend(ReferenceBackend):
        def __init__(self) -> None:
            super().__init__(CPU)
            self.shapes: list[tuple[int, ...]] = []

        def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
            self.shapes.append(tuple(weight.shape))
            return super().prepare_linear(weight, bias)

    backend = CountingBackend()
    config = read_model_config(folder)
    load_model(folder, config, backend=backend, dtype=torch.float32, device=CPU)
    # the head, then q/k/v, o, gate/up and down of two layers
    assert backend.shapes == [(131, 96), *[(160, 96), (96, 96), (320, 96), (96, 160)] * 2]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_counted(tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    # a packed weight is filled up to a multiple of 48 columns: here all have such widths
    folder = save_checkpoint(
        tmp_path, "llama", tie_word_embeddings=tied, num_hidden_layers=2,
        vocab_size=144, intermediate_size=168, num_key_value_heads=6,
    )  # fmt: skip
    model = load(folder, dtype)
    parameters = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    if tied and not isinstance(model.lm_head, RowSource):
        parameters += 144 * 96  # the packed head is a copy
    assert model.weights_bytes == parameters * dtype.itemsize
    assert model.kv_block_bytes(16) == 2 * 2 * 16 * 96 * dtype.itemsize
    caches = model.allocate_kv_caches(3, 16)
    assert sum(cache.key.nbytes + cache.value.nbytes for cache in caches) == 3 * model.kv_block_bytes(16)


def test_auto_dtype_is_the_checkpoints(folder: Path) -> None:
    config = read_model_config(edit_config(folder, dtype="bfloat16"))
    assert resolve_dtype("auto", config) == torch.bfloat16
    assert resolve_dtype("float32", config) == torch.float32


def test_a_base_spec_knows_the_shapes_without_the_weights(folder: Path) -> None:
    spec = build_base_spec(folder)
    assert (spec.name, spec.num_layers, spec.hidden_size, spec.vocab_size) == ("base", 2, 96, 131)
    assert [(spec.in_features[p], spec.out_features[p]) for p in (Projection.Q, Projection.K, Projection.DOWN)] == [
        (96, 96),
        (96, 32),
        (160, 96),
    ]
    assert not any(spec.has_bias.values())
    assert [module.path for module in spec.modules()][:2] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]


def test_the_base_digest_follows_the_meaning(folder: Path, tmp_path: Path) -> None:
    digest = build_base_spec(folder).digest
    twin = save_checkpoint(tmp_path / "twin", "llama", num_hidden_layers=2)
    assert build_base_spec(twin).digest == digest
    assert build_base_spec(edit_config(twin, use_cache=False, eos_token_id=7)).digest == digest
    assert build_base_spec(edit_config(twin, rms_norm_eps=1e-5)).digest != digest
    other = save_checkpoint(tmp_path / "other", "llama", num_hidden_layers=2, dtype=torch.bfloat16)
    assert build_base_spec(other).digest != digest


def test_a_model_is_a_folder_or_a_name_on_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(folder)) == folder
    for name in ("no-such-folder", "/no/such/folder", "a/b/c", "https://huggingface.co/org/name"):
        with pytest.raises(ConfigurationError, match="neither a folder nor a name"):
            resolve_model(name)
    with pytest.raises(ConfigurationError, match=r"is not a name on the Hugging Face Hub"):
        resolve_model("org/a..b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigurationError, match=r"'org/no-such-model' is not a folder here, not in the local cache"):
        resolve_model("org/no-such-model")
