"""Where the base model's files are: a folder, or a snapshot from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.engine.errors import ConfigurationError

# No pickles, no code: weights as safetensors, configuration, tokenizer and chat template.
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model_folder(model: str) -> Path:
    """The folder itself, or that of `org/name` on the hub, fetched at need. Blocking.

    Raises:
        ConfigurationError: there is no such folder, or the hub cannot be asked and has not been asked before.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _HUB_NAME.fullmatch(model):
        raise ConfigurationError(
            f"--model {model}: no such folder; give a Hugging Face model folder, or org/name", param="model"
        )
    return _fetch(model)


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigurationError(
            f"--model {name}: no such folder, and the Hugging Face hub did not give it "
            f"({type(error).__name__}); give a folder, or check the name and the network",
            param="model",
        ) from error
