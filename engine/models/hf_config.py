"""`config.json` of the Hugging Face folder: the fields that mean something here, their defaults, what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.config import ModelDType
from loraplex.engine.models.rope_config import RopeConfig, RopeParameters, resolve_rope

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


class HFConfig(msgspec.Struct, kw_only=True):
    """The fields under their own names, and what follows from them for the family."""

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
    def read(cls, path: Path) -> HFConfig:
        """Read and check the file.

        Raises:
            ConfigurationError: unreadable, not a supported family, or a feature that is not supported.
        """
        fields = read_json_object(path)
        model_type = fields.get("model_type")
        if not isinstance(model_type, str) or model_type not in SUPPORTED_MODEL_TYPES:
            raise refusal(
                f"model_type {model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        try:
            config = msgspec.convert(_FAMILY_DEFAULTS[model_type] | fields, cls)
        except msgspec.ValidationError as error:
            raise refusal(f"{error}") from error
        config._check_features()
        config._check_numbers()
        config._check_heads()
        config._check_layers()
        return config

    def _check_features(self) -> None:
        if self.quantization_config is not None:
            method = self.quantization_config.get("quant_method", "unknown")
            raise refusal(f"quantization_config (method {method!r}) is not supported; use the unquantized checkpoint")
        if self.hidden_act != "silu":
            raise refusal(f"hidden_act {self.hidden_act!r} is not supported; supported is silu")
        for architecture in self.architectures or ():
            if not architecture.endswith("ForCausalLM"):
                raise refusal(f"architecture {architecture!r} is not supported; supported are *ForCausalLM")

    def _check_numbers(self) -> None:
        for name in _AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise refusal(f"{name} is {value}; it must be at least 1")
        if not self.rms_norm_eps > 0:
            raise refusal(f"rms_norm_eps is {self.rms_norm_eps}; it must be above 0")

    def _check_heads(self) -> None:
        kv_heads = self.num_key_value_heads or self.num_attention_heads
        if self.num_attention_heads % kv_heads:
            raise refusal(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({kv_heads})"
            )
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise refusal(
                f"hidden_size ({self.hidden_size}) is not a multiple of num_attention_heads "
                f"({self.num_attention_heads}), and there is no head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if head_dim % 2:
            raise refusal(f"head_dim is {head_dim}; rotary embeddings need an even one")

    def _check_layers(self) -> None:
        for name in ("layer_types", "no_rope_layers"):
            given = getattr(self, name)
            if given is not None and len(given) < self.num_hidden_layers:
                raise refusal(f"{name} has {len(given)} entries for {self.num_hidden_layers} layers")
        for layer_type in self.layer_types or ():
            if layer_type not in _LAYER_TYPES:
                raise refusal(f"layer type {layer_type!r} is not supported; supported are {', '.join(_LAYER_TYPES)}")

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
                raise refusal(f"dtype {name!r} is not supported; supported are float32, bfloat16, float16")

    @property
    def rope(self) -> RopeConfig:
        # An old file's rope_scaling wins over rope_parameters, as in transformers.
        given = self.rope_scaling or self.rope_parameters or RopeParameters()
        if given.partial_rotary_factor is None:
            given.partial_rotary_factor = self.partial_rotary_factor
        return resolve_rope(
            given,
            theta=10000.0 if self.rope_theta is None else self.rope_theta,
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
            return self.layer_types[layer] == "sliding_attention"
        if self.model_type == "smollm3":
            return not self.rope_layers[layer]
        return layer >= self.max_window_layers


_LAYER_TYPES = ("full_attention", "sliding_attention")

_AT_LEAST_ONE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "sliding_window",
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


def read_json_object(path: Path) -> dict[str, object]:
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


def refusal(message: str) -> ConfigurationError:
    return ConfigurationError(f"config.json: {message}", param="model")
