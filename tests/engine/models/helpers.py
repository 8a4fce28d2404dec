"""Small random checkpoints of every family, what transformers makes of them, and our way through paged blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.forward_meta import ForwardMeta
from loraplex.engine.models.loader import load_model
from loraplex.engine.models.model_folder import read_model_config
from loraplex.kernels.attention.layout import build_attention_meta
from loraplex.kernels.attention.metadata import KVCache
from loraplex.kernels.dispatch import create_backend
from loraplex.kernels.lora.layout import build_lora_meta
from loraplex.kernels.lora.metadata import LoRAPools, SelectionSlots

CPU = torch.device("cpu")
BLOCK_SIZE = 16

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def save_checkpoint(folder: Path, model_type: str, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A random checkpoint whose weights are large enough that every feature shows in the logits."""
    config = AutoConfig.for_model(model_type, **(SIZES | fields))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise if "embed" in name else noise * 1.5 * parameter.shape[1] ** -0.5)
            else:
                parameter.copy_((1 if "norm" in name else 0) + 0.3 * noise)
    model.to(dtype).save_pretrained(folder)
    return folder


def edit_config(folder: Path, **fields: Any) -> Path:
    """Change `config.json`; None removes a field."""
    path = folder / "config.json"
    changed = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in changed.items() if value is not None}))
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    config = read_model_config(folder)
    return load_model(folder, config, backend=create_backend("auto", CPU), dtype=dtype, device=CPU)


@cache
def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(seed))


def transformers_logits(folder: Path, input_ids: Tensor) -> Tensor:
    """float32 `[T, vocab]` of transformers' eager attention in one pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: Tensor = model(input_ids[None], use_cache=False).logits[0]
    return logits


@dataclass(kw_only=True)
class PagedSequence:
    """One sequence on its way through the model."""

    input_ids: Tensor
    block_ids: list[int]
    selection: int = -1
    num_computed: int = 0


class PagedRunner:
    """Feeds chunks of several sequences to a model, as an engine's steps do; free blocks hold NaN."""

    def __init__(
        self,
        model: DecoderModel,
        prompts: Sequence[Tensor],
        *,
        selections: Sequence[int] | None = None,
        slots: Sequence[SelectionSlots] = (),
        pools: LoRAPools | None = None,
    ) -> None:
        self.model = model
        self.slots = slots
        self.pools = pools
        counts = [len(ids) // BLOCK_SIZE + 1 for ids in prompts]
        self.kv_caches = _poisoned(model.allocate_kv_caches(sum(counts) + 2, BLOCK_SIZE))
        free = iter((torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1).tolist())
        self.sequences = [
            PagedSequence(input_ids=ids, block_ids=[next(free) for _ in range(count)], selection=selection)
            for ids, count, selection in zip(prompts, counts, selections or [-1] * len(prompts), strict=True)
        ]

    def step(self, num_tokens: Sequence[int]) -> list[Tensor]:
        """Compute so many tokens of each sequence; float32 logits `[num_tokens, vocab]` of each."""
        batch = sorted(
            ((sequence, count) for sequence, count in zip(self.sequences, num_tokens, strict=True) if count),
            key=lambda entry: entry[1] > 1,
        )
        ids = torch.cat([s.input_ids[s.num_computed : s.num_computed + count] for s, count in batch])
        positions = torch.cat([torch.arange(s.num_computed, s.num_computed + count) for s, count in batch])
        hidden = self.model.forward(ids, positions, self.kv_caches, self._meta(batch))
        parts = torch.split(self.model.compute_logits(hidden).float(), [count for _, count in batch])
        for sequence, count in batch:
            sequence.num_computed += count
        by_sequence = {id(sequence): part for (sequence, _), part in zip(batch, parts, strict=True)}
        nothing = torch.empty(0, self.model.config.vocab_size)
        return [by_sequence.get(id(sequence), nothing) for sequence in self.sequences]

    def run(self, chunk: int, *, decode_from: int | None = None) -> list[Tensor]:
        """All sequences to their ends in chunks, token by token from `decode_from` on."""
        pieces: list[list[Tensor]] = [[] for _ in self.sequences]
        while any(s.num_computed < len(s.input_ids) for s in self.sequences):
            counts = [_next_count(sequence, chunk, decode_from) for sequence in self.sequences]
            for piece, logits in zip(pieces, self.step(counts), strict=True):
                piece.append(logits)
        return [torch.cat(piece) for piece in pieces]

    def _meta(self, batch: Sequence[tuple[PagedSequence, int]]) -> ForwardMeta:
        token_selection = np.repeat([s.selection for s, _ in batch], [count for _, count in batch]).astype(np.int32)
        return ForwardMeta(
            attention=build_attention_meta(
                query_lens=[count for _, count in batch],
                context_lens=[s.num_computed for s, _ in batch],
                block_ids=[s.block_ids for s, _ in batch],
                block_size=BLOCK_SIZE,
                device=CPU,
            ),
            lora=build_lora_meta(
                token_selection, self.slots, device=CPU, chunk_size=self.model.backend.lora_chunk_size
            ),
            pools=self.pools,
        )


def _poisoned(kv_caches: list[KVCache]) -> list[KVCache]:
    for kv_cache in kv_caches:
        kv_cache.key.fill_(torch.nan)
        kv_cache.value.fill_(torch.nan)
    return kv_caches


def _next_count(sequence: PagedSequence, chunk: int, decode_from: int | None) -> int:
    left = len(sequence.input_ids) - sequence.num_computed
    if decode_from is not None:
        if sequence.num_computed >= decode_from:
            return min(left, 1)
        left = min(left, decode_from - sequence.num_computed)
    return min(left, chunk)
