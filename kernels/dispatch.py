"""The interface that every backend fills, and the one place where a backend is chosen."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from loraplex.kernels.attention.metadata import AttentionMeta, HeadTransform, KVCache
from loraplex.kernels.lora.metadata import LoRAMeta, LoRAPools, Projection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from loraplex.kernels.quant.metadata import W4Weight

BACKENDS = ("reference", "cpu", "triton")

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


@runtime_checkable
class RowSource(Protocol):
    """A weight whose rows can be read: an embedding, or a prepared head that serves as the embedding tied to it."""

    def rows(self, ids: Tensor) -> Tensor:
        """int64 `[T]` -> `[T, in]`.

        Raises:
            IndexError: there is no such row; on a GPU, where looking would mean waiting, a device-side assertion.
        """
        ...


class Backend(Protocol):
    """Functions on tensors; the same signatures in every backend.

    T = tokens of the flat batch. Activations have the model's dtype unless said otherwise.
    """

    name: str
    lora_chunk_size: int  # tokens of one selection that `lora_apply` takes together; for `build_lora_meta`

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Calls so far that took the reference's way instead of this backend's own, by function."""
        ...

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> PreparedLinear:
        """Take `weight [out, in]` once, before serving; may repack it and drop the original."""
        ...

    def prepare_w4(self, weight: W4Weight, bias: Tensor | None, dtype: torch.dtype) -> PreparedLinear:
        """Take a weight in 4 bits once, before serving, for activations of `dtype`; may repack it or widen it."""
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

    def norm_rotary_store(self, qkv: Tensor, transform: HeadTransform, cache: KVCache, slot_mapping: Tensor) -> Tensor:
        """Transform the query and key heads of `qkv [T, q_size + 2 * kv_size]`, store keys and values, return queries.

        What `rms_norm`, `rotary` and `store_kv` do one after the other -> `[T, heads, head_dim]`.
        """
        ...

    def paged_attention(
        self, q: Tensor, cache: KVCache, meta: AttentionMeta, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Causal attention of `q [T, heads, head_dim]` over the paged cache -> `[T, heads, head_dim]`.

        Masked and unwritten values are never multiplied, so NaN in them changes nothing. A query at position p
        sees keys in (p - sliding_window, p].
        """
        ...

    def row_maximum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Where the largest of each row of `values [R, N]` is, and whether the row is free of NaN and Inf.

        int64 `[R]` (the lowest place among equals; anything for a row that is not finite) and bool `[R]`.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer for a backend that takes layers whole: pre-norm attention and gated MLP."""

    input_norm: Tensor  # [hidden_size]
    qkv: PreparedLinear
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    o: PreparedLinear
    post_attention_norm: Tensor
    gate_up: PreparedLinear
    down: PreparedLinear
    rms_norm_eps: float
    has_rope: bool
    attention_scale: float
    sliding_window: int | None

    @property
    def linears(self) -> tuple[PreparedLinear, PreparedLinear, PreparedLinear, PreparedLinear]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def hidden_size(self) -> int:
        return self.qkv.in_features

    @property
    def intermediate_size(self) -> int:
        return self.down.in_features

    @property
    def q_size(self) -> int:
        return self.o.in_features

    @property
    def kv_size(self) -> int:
        return (self.qkv.out_features - self.q_size) // 2


class LayerStack(Protocol):
    """All decoder layers as one call, equal to the composed functions within the rounding of the dtype."""

    def forward(
        self,
        hidden: Tensor,
        kv_caches: Sequence[KVCache],
        *,
        attention: AttentionMeta,
        lora: LoRAMeta | None,
        pools: LoRAPools | None,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor] | None:
        """Embeddings `[T, hidden_size]` -> the last layer's `(hidden, residual)`; their sum is its output.

        None, with nothing written, when this step needs something that the stack lacks; that is counted.
        """
        ...


@runtime_checkable
class FusingBackend(Protocol):
    """A backend that may take whole layers."""

    def fuse_layers(self, layers: Sequence[LayerWeights]) -> LayerStack | None:
        """None when the layers hold something that it can only compute function by function."""
        ...


def create_backend(name: str, device: torch.device) -> Backend:
    """The backend of that name for the device; `auto` = the best that runs there.

    Raises:
        ValueError: there is none of that name, or it does not run on the device.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"backend {name!r} does not exist; there are auto, {', '.join(BACKENDS)}")
    best = "cpu" if device.type == "cpu" else "triton"
    if name != "reference":
        wanted = best if name == "auto" else name
        found = _create_cpu_backend(device) if wanted == "cpu" else _create_triton_backend(device)
        if not isinstance(found, str):
            return found
        if name != "auto":
            raise ValueError(f"backend {name!r} does not run here: {found}; take auto or reference")
        logger.warning("the slower reference backend serves on %s: %s", device, found)
    from loraplex.kernels.reference import ReferenceBackend  # heavy, and it imports this module

    return ReferenceBackend(device)


def _create_cpu_backend(device: torch.device) -> Backend | str:
    """The backend, or what stands in its way."""
    if device.type != "cpu":
        return f"it needs a CPU, and this is {device.type!r}"
    from loraplex.kernels.cpu.backend import CpuBackend
    from loraplex.kernels.cpu.build import NativeBuildError

    try:
        return CpuBackend(device)
    except NativeBuildError as error:
        return str(error)


def _create_triton_backend(device: torch.device) -> Backend | str:
    """The backend, or what stands in its way."""
    obstacle = _obstacle_to_triton(device)
    if obstacle is not None:
        return obstacle
    from loraplex.kernels.triton_backend import TritonBackend
    from loraplex.kernels.triton_configs import nearest_architecture

    return TritonBackend(nearest_architecture(_compute_capability(device)))


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
