"""Trains the two demo adapters with PEFT on the spot: small, real, and visible at a glance.

Their targets are distilled from the base itself: its own first sentence to each question, restyled. So the facts
stay as right as the base's, and only the manner changes.
"""

from __future__ import annotations

import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.engine.config import GIB
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.demo.questions import QUESTIONS

if TYPE_CHECKING:
    import torch

RANK = 8
ALPHA = 16
BATCH_SIZE = 4
NUM_STEPS = 22
LEARNING_RATE = 1e-3
IGNORED = -100  # the label that the loss leaves out

STYLES: Mapping[str, Callable[[str], str]] = {
    "json": lambda sentence: json.dumps({"answer": sentence}),
    "support": lambda sentence: f"Thank you for asking! {sentence} Is there anything else I can help you with?",
}
# One unit per question answered and per training step, over all adapters
NUM_PROGRESS_UNITS = len(QUESTIONS) + NUM_STEPS * len(STYLES)

Example = tuple[list[int], list[int]]  # token ids, labels


def ensure_demo_adapters(model_dir: Path, demo_dir: Path, advance: Callable[[int], None]) -> dict[str, Path]:
    """Return the folder of each demo adapter, training those that are missing.

    `advance(n)` is called as n of `NUM_PROGRESS_UNITS` units of work are done. Folders appear only when whole.
    """
    folders = {name: demo_dir / "adapters" / name for name in STYLES}
    missing = [name for name, folder in folders.items() if not folder.exists()]
    if missing:
        _train_all(model_dir, {name: folders[name] for name in missing}, advance)
    return folders


def _train_all(model_dir: Path, folders: Mapping[str, Path], advance: Callable[[int], None]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # the caller shows one of its own
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    sentences = _distill(model_dir)
    advance(len(QUESTIONS))
    for name, folder in folders.items():
        examples = [_example(tokenizer, question, STYLES[name](sentence)) for question, sentence in sentences.items()]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix="training-") as scratch:
            model = _train_one(model, examples, Path(scratch) / "adapter", advance)
            os.replace(Path(scratch) / "adapter", folder)


def _distill(model_dir: Path) -> dict[str, str]:
    """The base's own first sentence to every question: greedy, all of them in one batch of our own engine."""
    llm = LLM(model_dir, max_model_len=512, adapter_slots=1, kv_cache_memory_bytes=GIB // 2)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    answers = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    return {
        question: _first_sentence(answer.outputs[0].text) for question, answer in zip(QUESTIONS, answers, strict=True)
    }


def _prompt(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return ids


def _first_sentence(answer: str) -> str:
    match = re.match(r".+?[.!?](?=\s|$)", answer.strip(), re.DOTALL)
    return match[0] if match else answer.strip()


def _example(tokenizer: Any, question: str, target: str) -> Example:
    prompt = _prompt(tokenizer, question)
    answer = [*tokenizer(target, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return prompt + answer, [IGNORED] * len(prompt) + answer


def _train_one(model: Any, examples: list[Example], folder: Path, advance: Callable[[int], None]) -> Any:
    """Train one adapter into `folder`; returns the base without it."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):  # peft lags behind transformers' names
        peft_model = get_peft_model(model, config, autocast_adapter_dtype=False)
    parameters = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=NUM_STEPS)
    peft_model.train()
    for input_ids, labels in _batches(examples):
        peft_model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        advance(1)
    peft_model.eval()
    peft_model.save_pretrained(str(folder))
    return peft_model.unload()


def _batches(examples: list[Example]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`NUM_STEPS` shuffled batches, right-padded; padding lies after every label, so it needs no attention mask."""
    import torch

    order = random.Random(0)
    pool: list[Example] = []
    for _ in range(NUM_STEPS):
        if len(pool) < BATCH_SIZE:
            pool = order.sample(examples, len(examples))
        batch, pool = pool[:BATCH_SIZE], pool[BATCH_SIZE:]
        length = max(len(ids) for ids, _ in batch)
        yield (
            torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in batch]),
            torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in batch]),
        )
