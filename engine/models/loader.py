"""From a folder of safetensors to a decoder whose weights each passed once through the backend."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraplex.engine.config import DType
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.layers.attention import PagedAttention
from loraplex.engine.layers.lora_linear import LoRALinear
from loraplex.engine.layers.rotary import RotaryEmbedding
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.decoder_layer import DecoderLayer
from loraplex.engine.models.weight_names import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    check_tensors,
    has_bias,
    layer_prefix,
    module_path,
)
from loraplex.kernels.dispatch import Backend, FusingBackend, PreparedLinear
from loraplex.kernels.lora.metadata import Projection

_QKV = (Projection.Q, Projection.K, Projection.V)
_GATE_UP = (Projection.GATE, Projection.UP)


def resolve_dtype(dtype: DType, config: ModelConfig) -> torch.dtype:
    """`auto` = what the checkpoint is stored in."""
    name = config.dtype if dtype == "auto" else dtype
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def load_model(
    model_dir: Path, model_config: ModelConfig, *, backend: Backend, dtype: torch.dtype, device: torch.device
) -> DecoderModel:
    """Load the decoder; peak memory is the model and one fused projection.

    Raises:
        ConfigurationError: the weights do not fit the configuration, or a file is damaged.
    """
    checkpoint = Checkpoint.open(model_dir)
    check_tensors(model_config, checkpoint.headers)
    with ExitStack() as stack, torch.inference_mode():
        reader = _WeightReader(checkpoint, dtype, device, stack)
        return _ModelBuilder(model_config, backend, reader).build()


class _WeightReader:
    """Reads tensors by name into the serving dtype, one file handle per file."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, stack: ExitStack) -> None:
        self.dtype = dtype
        self.device = device
        self._checkpoint = checkpoint
        try:
            self._handles = {
                file: stack.enter_context(safe_open(file, framework="pt", device="cpu")) for file in checkpoint.files
            }
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"the weights are damaged: {error}", param="model") from error

    def read(self, name: str) -> Tensor:
        # copied: a tensor of the right dtype is otherwise a view of the mapped file
        return self._stored(name).to(device=self.device, dtype=self.dtype, copy=True)

    def read_fused(self, names: Sequence[str]) -> Tensor:
        """The tensors one after another along the first dimension."""
        shapes = [self._checkpoint.headers[name].shape for name in names]
        fused = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for name, part in zip(names, torch.split(fused, [shape[0] for shape in shapes]), strict=True):
            part.copy_(self._stored(name))
        return fused

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._handles[self._checkpoint.file_of[name]].get_tensor(name)
        return tensor


class _ModelBuilder:
    """Puts layers together and counts the bytes that stay."""

    def __init__(self, config: ModelConfig, backend: Backend, reader: _WeightReader) -> None:
        self.config = config
        self.backend = backend
        self.reader = reader
        self.weights_bytes = 0

    def build(self) -> DecoderModel:
        config = self.config
        embedding = self._tensor(EMBEDDING)
        lm_head = self._lm_head(embedding)
        layers = [self._layer(layer) for layer in range(config.num_layers)]
        final_norm = self._tensor(FINAL_NORM)
        return DecoderModel(
            config=config,
            backend=self.backend,
            embedding=embedding,
            layers=layers,
            fused=(
                self.backend.fuse_layers([layer.weights() for layer in layers])
                if isinstance(self.backend, FusingBackend)
                else None
            ),
            final_norm=final_norm,
            lm_head=lm_head,
            rotary=RotaryEmbedding(config.rope, config.head_dim, self.reader.device),
            weights_bytes=self.weights_bytes,
        )

    def _lm_head(self, embedding: Tensor) -> PreparedLinear:
        if not self.config.tie_word_embeddings:
            return self._prepare(self.reader.read(LM_HEAD), None)
        head = self.backend.prepare_linear(embedding, None)
        self.weights_bytes += 0 if head.shares(embedding) else head.nbytes
        return head

    def _layer(self, layer: int) -> DecoderLayer:
        config, prefix = self.config, layer_prefix(layer)
        return DecoderLayer(
            config=config,
            backend=self.backend,
            has_rope=config.rope_layers[layer],
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight"),
            qkv_proj=self._linear(layer, _QKV),
            q_norm=self._tensor(f"{prefix}.self_attn.q_norm.weight") if config.has_qk_norm else None,
            k_norm=self._tensor(f"{prefix}.self_attn.k_norm.weight") if config.has_qk_norm else None,
            attention=PagedAttention(
                backend=self.backend, scale=config.head_dim**-0.5, sliding_window=config.sliding_windows[layer]
            ),
            o_proj=self._linear(layer, (Projection.O,)),
            post_attention_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight"),
            gate_up_proj=self._linear(layer, _GATE_UP),
            down_proj=self._linear(layer, (Projection.DOWN,)),
        )

    def _linear(self, layer: int, projections: Sequence[Projection]) -> LoRALinear:
        paths = [module_path(layer, projection) for projection in projections]
        weight = self.reader.read_fused([f"{path}.weight" for path in paths])
        bias = None
        if has_bias(self.config, projections[0]):
            bias = self.reader.read_fused([f"{path}.bias" for path in paths])
        return LoRALinear(
            backend=self.backend, weight=self._prepare(weight, bias), layer=layer, projections=projections
        )

    def _prepare(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        prepared = self.backend.prepare_linear(weight, bias)
        self.weights_bytes += prepared.nbytes
        return prepared

    def _tensor(self, name: str) -> Tensor:
        tensor = self.reader.read(name)
        self.weights_bytes += tensor.nbytes
        return tensor
