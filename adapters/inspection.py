"""Is this folder an adapter that this base can serve? Torch-free; reads no tensor values."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loraplex.adapters.base_spec import BaseSpec


class ModuleFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one base module gets from the adapter."""

    path: str
    rank: int
    scaling: float  # alpha / r or alpha / sqrt(r), as float32


class AdapterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a folder that passed; JSON-able by msgspec."""

    peft_type: str  # "LORA"
    use_rslora: bool
    rank: int  # the largest
    modules: tuple[ModuleFacts, ...]
    target_modules: tuple[str, ...]  # short names, e.g. ("q_proj", "v_proj")
    num_tensors: int
    num_mapped_tensors: int
    dtypes: tuple[str, ...]  # safetensors names, e.g. ("BF16",)
    num_attention_slots: int
    num_mlp_slots: int
    size_bytes: int  # of the version's files
    base_model_name: str | None
    warnings: tuple[str, ...]


def inspect_adapter(
    folder: Path, base: BaseSpec, *, max_lora_rank: int, slot_rank: int, num_slots: int
) -> AdapterFacts:
    """Check files, config, headers, names and shapes of the adapter in `folder`.

    Raises:
        AdapterRefusedError: with every reason that was found.
    """
    raise NotImplementedError
