"""The shapes of the models that are checked, and random weights for them, made on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.ref import AdapterRef
from loraplex.adapters.turns import Piece
from loraplex.adapters.weights import AdapterWeights, ModuleWeights
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.rope_config import RopeConfig
from loraplex.engine.models.weight_names import EMBEDDING, expected_tensors
from loraplex.kernels.lora.metadata import Projection


def llama(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_attention_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    tie_word_embeddings: bool = False,
) -> ModelConfig:
    return ModelConfig(
        model_type="llama",
        dtype="bfloat16",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_attention_heads=num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_attention_heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=500_000.0),
        rope_layers=(True,) * num_layers,
        sliding_windows=(None,) * num_layers,
        has_qkv_bias=False,
        has_o_bias=False,
        has_mlp_bias=False,
        has_qk_norm=False,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_ids=frozenset(),
    )


LLAMA_8B = llama(
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_attention_heads=32,
    num_kv_heads=8,
    vocab_size=128_256,
)
SMOLLM2_135M = llama(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_attention_heads=9,
    num_kv_heads=3,
    vocab_size=49_152,
    tie_word_embeddings=True,
)
TINY = llama(
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_attention_heads=4,
    num_kv_heads=2,
    vocab_size=256,
)

RANKS = (8, 16, 32, 64)
SLOT_RANK = 8


class RandomWeights:
    """A `WeightReader` whose tensors never were in a file."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._dtype = dtype
        self._shapes = expected_tensors(config)
        self._generator = torch.Generator(device).manual_seed(0)

    def read(self, name: str) -> Tensor:
        return self._random(self._shapes[name], is_embedding=name == EMBEDDING)

    def read_fused(self, names: Sequence[str]) -> Tensor:
        shapes = [self._shapes[name] for name in names]
        return self._random((sum(shape[0] for shape in shapes), *shapes[0][1:]), is_embedding=False)

    def _random(self, shape: tuple[int, ...], *, is_embedding: bool) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self._dtype, device=self.device)
        std = 1.0 if is_embedding else shape[1] ** -0.5
        weights = torch.empty(shape, dtype=self._dtype, device=self.device)
        return weights.normal_(0, std, generator=self._generator)


class RandomAdapters:
    """An `AdapterReader` of adapters with ranks 8, 16, 32, 64 in turn, all seven projections of every layer."""

    def __init__(self, base: BaseSpec, *, num_adapters: int, dtype: torch.dtype, device: torch.device) -> None:
        self._base = base
        self._dtype = dtype
        self._device = device
        self._ranks = {_digest(index): RANKS[index % len(RANKS)] for index in range(num_adapters)}

    @property
    def refs(self) -> list[AdapterRef]:
        return [AdapterRef(digest, rank // SLOT_RANK, rank // SLOT_RANK) for digest, rank in self._ranks.items()]

    def read(self, digest: str, piece: Piece) -> AdapterWeights:
        with piece():
            modules = tuple(self._modules(digest))
        num_bytes = sum(module.lora_a.nbytes + module.lora_b.nbytes for module in modules)
        scaling = torch.full((self._base.num_layers, len(Projection)), 0.5)
        return AdapterWeights(modules=modules, scaling=scaling, num_bytes=num_bytes)

    def _modules(self, digest: str) -> Iterable[ModuleWeights]:
        rank, generator = self._ranks[digest], torch.Generator(self._device).manual_seed(int(digest[:12], 16))
        for spec in self._base.modules():
            lora_a = torch.empty(rank, spec.in_features, dtype=self._dtype, device=self._device)
            lora_b = torch.empty(spec.out_features, rank, dtype=self._dtype, device=self._device)
            yield ModuleWeights(
                layer=spec.layer,
                projection=spec.projection,
                lora_a=lora_a.normal_(0, spec.in_features**-0.5, generator=generator),
                lora_b=lora_b.normal_(0, 0.1, generator=generator),
            )


def num_slots_of(refs: Iterable[AdapterRef]) -> int:
    return sum(ref.num_attention_slots for ref in refs)


def _digest(index: int) -> str:
    return hashlib.sha256(f"random adapter {index}".encode()).hexdigest()
