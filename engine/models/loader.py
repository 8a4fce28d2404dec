"""From a folder of safetensors to a decoder in the serving dtype."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.models.checkpoint import Checkpoint
from loraplex.engine.models.config import ModelConfig
from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.decoder_builder import build_decoder
from loraplex.engine.models.weight_names import check_tensors
from loraplex.kernels.dispatch import Backend


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
        return build_decoder(model_config, backend, _CheckpointReader(checkpoint, dtype, device, stack))


class _CheckpointReader:
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
