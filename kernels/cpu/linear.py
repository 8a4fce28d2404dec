"""A weight in panels, read once from front to back by the kernels."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex.kernels.cpu import native
from loraplex.kernels.cpu.huge_pages import WeightMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelLinear:
    """The layout is `src/linear.h`'s. `as_struct` points into `panels` and `bias`, which live as long as this does."""

    panels: Tensor  # flat, of the weight's dtype
    bias: Tensor | None
    as_struct: native.Linear
    library: ctypes.CDLL

    @classmethod
    def pack(cls, library: ctypes.CDLL, memory: WeightMemory, weight: Tensor, bias: Tensor | None) -> PanelLinear:
        """`weight [out, in]`, float32 or bfloat16."""
        suffix = native.SUFFIXES[weight.dtype]
        out_features, in_features = weight.shape
        weight = weight.contiguous()
        size = getattr(library, f"packed_size_{suffix}")(out_features, in_features)
        panels = memory.empty(size, weight.dtype)
        getattr(library, f"pack_{suffix}")(
            torch.get_num_threads(), weight.data_ptr(), panels.data_ptr(), out_features, in_features
        )
        bias = None if bias is None else bias.to(weight.dtype).contiguous()
        struct = native.Linear(panels.data_ptr(), None if bias is None else bias.data_ptr(), in_features, out_features)
        return cls(panels=panels, bias=bias, as_struct=struct, library=library)

    @property
    def dtype(self) -> torch.dtype:
        return self.panels.dtype

    @property
    def in_features(self) -> int:
        return int(self.as_struct.in_features)

    @property
    def out_features(self) -> int:
        return int(self.as_struct.out_features)

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight as it was before it was packed (see `RowSource`)."""
        if len(ids):
            lowest, highest = torch.aminmax(ids)
            if lowest < 0 or highest >= self.out_features:
                raise IndexError(f"rows {lowest} to {highest} were asked for; there are {self.out_features}")
        ids = ids.contiguous()
        rows = self.panels.new_empty(len(ids), self.in_features)
        gather = getattr(self.library, f"gather_rows_{native.SUFFIXES[self.dtype]}")
        gather(torch.get_num_threads(), ctypes.addressof(self.as_struct), ids.data_ptr(), len(ids), rows.data_ptr())
        return rows
