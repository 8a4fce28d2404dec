"""The table of token embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingTable:
    """Fills `RowSource`."""

    weight: Tensor  # [vocab_size, hidden_size]

    def rows(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
