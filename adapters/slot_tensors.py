"""The pooled A and B of all resident adapters, and how a version's weights get into its slots."""

from __future__ import annotations

import torch

from loraplex.adapters.base_spec import BaseSpec
from loraplex.kernels.lora.metadata import LoRAPools


def slot_bytes(base: BaseSpec, *, slot_rank: int, dtype: torch.dtype) -> int:
    """Bytes of one attention slot and one MLP slot together (`num_slots` = that many of each)."""
    raise NotImplementedError


class SlotTensors:
    pools: LoRAPools

    @classmethod
    def allocate(
        cls, base: BaseSpec, *, num_slots: int, slot_rank: int, dtype: torch.dtype, device: str | torch.device
    ) -> SlotTensors:
        raise NotImplementedError
