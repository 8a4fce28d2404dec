"""What a decoder is, read from `config.json` without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.rope_config import RopeConfig, RopeParameters, resolve_rope

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")

ModelDType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the supported families; the model's code asks only this, never the family's name."""

    model_type: str
    dtype: ModelDType  # of the checkpoint, as config.json says; float32 when it does not
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    rope_layers: tuple[bool, ...]  # per layer: are q and k rotated
    sliding_windows: tuple[int | None, ...]  # per layer: keys that a query sees, itself included; None = all
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]

    @classmethod
    def from_folder(cls, path: Path) -> ModelConfig:
        """Read `config.json` and, for the end tokens, `generation_config.json`.

        Raises:
            ConfigurationError: unreadable, not a supported family, or a feature that is not supported.
        """
        raw = _RawConfig.read(path / "config.json")
        raw.check()
        return cls(
            model_type=raw.model_type,
            dtype=raw.checkpoint_dtype,
            vocab_size=raw.vocab_size,
            hidden_size=raw.hidden_size,
            intermediate_size=raw.intermediate_size,
            num_layers=raw.num_hidden_layers,
            num_attention_heads=raw.num_attention_heads,
            num_kv_heads=raw.num_key_value_heads or raw.num_attention_heads,
            head_dim=raw.head_dim or raw.hidden_size // raw.num_attention_heads,
            rms_norm_eps=raw.rms_norm_eps,
            max_position_embeddings=raw.max_position_embeddings,
            rope=raw.rope,
            rope_layers=raw.rope_layers,
            sliding_windows=raw.sliding_windows,
            has_qkv_bias=raw.has_attention_bias or raw.model_type == "qwen2",
            has_o_bias=raw.has_attention_bias,
            has_mlp_bias=raw.mlp_bias and raw.model_type in ("llama", "smollm3"),
            has_qk_norm=raw.model_type == "qwen3",
            tie_word_embeddings=raw.tie_word_embeddings,
            eos_token_ids=_eos_token_ids(path, raw),
        )

    @property
    def q_size(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def max_context_len(self) -> int:
        """Tokens that the position embeddings were made for."""
        stretched = (
            self.rope.factor * self.rope.original_max_position_embeddings if self.rope.rope_type == "yarn" else 0
        )
        return max(self.max_position_embeddings, int(stretched))


class _RawConfig(msgspec.Struct, kw_only=True):
    """The fields of `config.json` that mean something here, under their own names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    architectures: list[str] | None = None
    quantization_config: dict[str, object] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: int | list[int] | None = None
    rope_theta: float | None = None
    rope_scaling: RopeParameters | None = None
    rope_parameters: RopeParameters | None = None
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = 4

    @classmethod
    def read(cls, path: Path) -> _RawConfig:
        fields = _read_json_object(path)
        model_type = fields.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise _refusal(
                f"model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        try:
            return msgspec.convert(_FAMILY_DEFAULTS[model_type] | fields, cls)
        except msgspec.ValidationError as error:
            raise _refusal(f"{error}") from error

    def check(self) -> None:
        self._check_features()
        self._check_sizes()

    def _check_features(self) -> None:
        if self.quantization_config is not None:
            method = self.quantization_config.get("quant_method", "unknown")
            raise _refusal(f"quantization_config (method {method!r}) is not supported; use the unquantized checkpoint")
        if self.hidden_act != "silu":
            raise _refusal(f"hidden_act {self.hidden_act!r} is not supported; supported is silu")
        for architecture in self.architectures or ():
            if not architecture.endswith("ForCausalLM"):
                raise _refusal(f"architecture {architecture!r} is not supported; supported are *ForCausalLM")

    def _check_sizes(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise _refusal(f"{name} is {getattr(self, name)}; it must be at least 1")
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if kv_heads < 1 or self.num_attention_heads % kv_heads:
            raise _refusal(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise _refusal(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}), and there is no head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim < 2 or head_dim % 2:
            raise _refusal(f"head_dim is {head_dim}; rotary embeddings need an even one")
        for name in ("layer_types", "no_rope_layers"):
            given = getattr(self, name)
            if given is not None and len(given) < self.num_hidden_layers:
                raise _refusal(f"{name} has {len(given)} entries for {self.num_hidden_layers} layers")

    @property
    def has_attention_bias(self) -> bool:
        return self.attention_bias and self.model_type in ("llama", "qwen3", "smollm3")

    @property
    def checkpoint_dtype(self) -> ModelDType:
        name = (self.dtype or self.torch_dtype or "float32").removeprefix("torch.")
        match name:
            case "float32" | "bfloat16" | "float16":
                return name
            case _:
                raise _refusal(f"dtype {name!r} is not supported; supported are float32, bfloat16, float16")

    @property
    def rope(self) -> RopeConfig:
        # An old file's rope_scaling wins over rope_parameters, as in transformers.
        given = self.rope_scaling or self.rope_parameters or RopeParameters()
        if given.partial_rotary_factor is None:
            given.partial_rotary_factor = self.partial_rotary_factor
        return resolve_rope(
            given,
            theta=self.rope_theta or 10000.0,
            max_position_embeddings=self.max_position_embeddings,
            original_max_position_embeddings=self.original_max_position_embeddings,
        )

    @property
    def rope_layers(self) -> tuple[bool, ...]:
        layers = range(self.num_hidden_layers)
        if self.model_type != "smollm3":
            return tuple(True for _ in layers)
        if self.no_rope_layers is not None:  # despite its name, 1 means: with rope
            return tuple(self.no_rope_layers[layer] != 0 for layer in layers)
        return tuple((layer + 1) % self.no_rope_layer_interval != 0 for layer in layers)

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        layers = range(self.num_hidden_layers)
        if self.sliding_window is None or self.model_type == "llama":
            return tuple(None for _ in layers)
        if self.model_type == "mistral":
            return tuple(self.sliding_window for _ in layers)
        if not self.use_sliding_window:
            return tuple(None for _ in layers)
        return tuple(self.sliding_window if self._is_sliding(layer) else None for layer in layers)

    def _is_sliding(self, layer: int) -> bool:
        if self.layer_types is not None:
            if self.layer_types[layer] not in ("full_attention", "sliding_attention"):
                raise _refusal(
                    f"layer type {self.layer_types[layer]!r} is not supported; "
                    "supported are full_attention, sliding_attention"
                )
            return self.layer_types[layer] == "sliding_attention"
        if self.model_type == "smollm3":
            return not self.rope_layers[layer]
        return layer >= self.max_window_layers


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "no_rope_layer_interval",
)

# What transformers' configuration classes assume for a key that the file lacks.
_FAMILY_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True},
}


def _eos_token_ids(path: Path, raw: _RawConfig) -> frozenset[int]:
    """`generation_config.json` wins where it names any, as in transformers' `generate`."""
    given: object = None
    if (path / "generation_config.json").exists():
        given = _read_json_object(path / "generation_config.json").get("eos_token_id")
    if given is None:
        given = raw.eos_token_id
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ConfigurationError(
            f"eos_token_id is {given!r}; it must be an integer or a list of integers", param="model"
        )
    return frozenset(ids)


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        fields = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path} does not exist; a model is a Hugging Face folder with {path.name}", param="model"
        ) from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not readable JSON: {error}", param="model") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{path} is not a JSON object", param="model")
    return fields


def _refusal(message: str) -> ConfigurationError:
    return ConfigurationError(f"config.json: {message}", param="model")
