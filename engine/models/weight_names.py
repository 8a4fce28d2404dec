"""The tensors that a checkpoint of a configuration holds, by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.config import ModelConfig
from loraplex.kernels.lora.metadata import Projection

if TYPE_CHECKING:  # its module reads files, which a model made in memory does without
    from loraplex.engine.models.checkpoint import TensorHeader

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_SHOWN = 5


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def module_path(layer: int, projection: Projection) -> str:
    block = "self_attn" if projection.is_attention else "mlp"
    return f"{layer_prefix(layer)}.{block}.{projection.module_name}"


def projection_shape(config: ModelConfig, projection: Projection) -> tuple[int, int]:
    """`(out_features, in_features)`, as the weight is stored."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    match projection:
        case Projection.Q:
            return config.q_size, hidden
        case Projection.K | Projection.V:
            return config.kv_size, hidden
        case Projection.O:
            return hidden, config.q_size
        case Projection.GATE | Projection.UP:
            return intermediate, hidden
        case Projection.DOWN:
            return hidden, intermediate


def has_bias(config: ModelConfig, projection: Projection) -> bool:
    if projection == Projection.O:
        return config.has_o_bias
    return config.has_qkv_bias if projection.is_attention else config.has_mlp_bias


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that must be there."""
    expected: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        expected[LM_HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        expected |= _layer_tensors(config, layer)
    return expected


def check_tensors(config: ModelConfig, headers: Mapping[str, TensorHeader]) -> None:
    """Every expected tensor with its shape in a float dtype, and no other.

    Raises:
        ConfigurationError: lists what is missing, misshapen or unknown.
    """
    expected = expected_tensors(config)
    faults = [f"{name} is missing" for name in expected if name not in headers]
    for name, header in headers.items():
        if name not in expected:
            if not _is_harmless(config, name):
                faults.append(f"{name} is not a tensor of a {config.model_type} decoder of this configuration")
        elif header.shape != expected[name]:
            faults.append(f"{name} has shape {list(header.shape)}, config.json says {list(expected[name])}")
        elif header.dtype not in _FLOAT_DTYPES:
            faults.append(f"{name} has dtype {header.dtype}; supported are {', '.join(_FLOAT_DTYPES)}")
    if faults:
        rest = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise ConfigurationError(
            f"the weights do not fit config.json: {'; '.join(faults[:_SHOWN])}{rest}", param="model"
        )


def _layer_tensors(config: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    prefix = layer_prefix(layer)
    tensors: dict[str, tuple[int, ...]] = {
        f"{prefix}.input_layernorm.weight": (config.hidden_size,),
        f"{prefix}.post_attention_layernorm.weight": (config.hidden_size,),
    }
    if config.has_qk_norm:
        tensors[f"{prefix}.self_attn.q_norm.weight"] = (config.head_dim,)
        tensors[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
    for projection in Projection:
        shape = projection_shape(config, projection)
        tensors[f"{module_path(layer, projection)}.weight"] = shape
        if has_bias(config, projection):
            tensors[f"{module_path(layer, projection)}.bias"] = shape[:1]
    return tensors


def _is_harmless(config: ModelConfig, name: str) -> bool:
    """Derived values that old exports stored: rotary frequencies, and the head's copy of a tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (name == LM_HEAD and config.tie_word_embeddings)
