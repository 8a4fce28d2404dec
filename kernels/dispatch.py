"""The interface that every backend fills, and the one place where a backend is chosen."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from loraplex.kernels.attention.metadata import AttentionMeta, KVCache
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BACKENDS = ("reference", "triton")

logger = logging.getLogger(__name__)


class PreparedLinear(Protocol):
    """A weight in the layout that its backend likes best; opaque to everybody else."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of weight and bias as they are held."""
        ...

    def shares(self, weight: Tensor) -> bool:
        """Whether it holds this very `weight` and no copy: a tied embedding then costs nothing more."""
        ...


class Backend(Protocol):
    """Functions on tensors; the same signatures in every backend.

    T = tokens of the flat batch. Activations have the model's dtype unless said otherwise.
    """

    name: str
    lora_chunk_size: int  # tokens of one selection that `lora_apply` takes together; for `build_lora_meta`

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """Take `weight [out, in]` once, before serving; may repack it and drop the original."""
        ...

    def linear(self, x: Tensor, weight: PreparedLinear) -> Tensor:
        """`x [T, in]` -> `[T, out]`, bias included."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension in float32, round once, multiply by `weight`."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return `(rms_norm(x + residual), x + residual)`."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves of `q [T, heads, head_dim]`, `k [T, kv_heads, head_dim]` by `cos, sin [T, head_dim]`."""
        ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """`[T, 2 * intermediate]` -> `silu(gate) * up [T, intermediate]`."""
        ...

    def store_kv(self, key: Tensor, value: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
        """Write `key, value [T, kv_heads, head_dim]` at `slot_mapping [T]`."""
        ...

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Causal attention of `q [T, heads, head_dim]` over the paged cache -> `[T, heads, head_dim]`.

        Masked and unwritten values are never multiplied, so NaN in them changes nothing. A query at position p
        sees keys in (p - sliding_window, p].
        """
        ...

    def lora_apply(
        self,
        x: Tensor,
        y: Tensor,
        pools: LoRAPools,
        *,
        layer: int,
        projections: Sequence[Projection],
        meta: LoRAMeta | None,
    ) -> None:
        """Add to `y [T, sum of out_features]`, in place, the delta of `x [T, in]` for the fused `projections`.

        `y[t, o] += sum over slots s of weight[s] * scaling[layer, projection, s] * sum_r B[s, r, o] * (A[s, r] . x[t])`

        The delta is summed in float32 and added with one rounding; it is bitwise independent of what else is in
        the batch. Rows without an adapter are not touched.
        """
        ...


def create_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name for the device; `auto` = the best that runs there.

    Raises:
        ValueError: there is none of that name, or it does not run on the device.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend {name!r} does not exist; there are auto, {', '.join(BACKENDS)}")
    obstacle = _obstacle_to_triton(device)
    if name == "triton" and obstacle is not None:
        raise ValueError(f"backend 'triton' does not run here: {obstacle}; take auto or reference")
    if name == "auto" and device.type == "cuda" and obstacle is not None:
        logger.warning("the slower reference backend serves on %s: %s", device, obstacle)
    if name == "reference" or obstacle is not None:
        from loraplex.kernels.reference import ReferenceBackend  # heavy, and it imports this module

        return ReferenceBackend(device)
    return _create_triton_backend(device)


def _obstacle_to_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, and this is {device.type!r}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    major, minor = _compute_capability(device)
    return f"it needs compute capability 8.0, and {device} has {major}.{minor}" if major < 8 else None


def _compute_capability(device: torch.device) -> tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(device)


def _create_triton_backend(device: torch.device) -> Backend:
    from loraplex.kernels.triton_backend import TritonBackend
    from loraplex.kernels.triton_configs import nearest_architecture

    return TritonBackend(nearest_architecture(_compute_capability(device)))
