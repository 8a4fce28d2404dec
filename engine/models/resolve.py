"""From what the user calls the model to a folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from loraplex.engine.errors import ConfigurationError

# No pickle is ever fetched, and no code; nor the second copy of the weights that some publishers add.
ALLOWED_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
IGNORED_PATTERNS = ("*/*", "consolidated*")

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)


def resolve_model(name_or_path: str) -> Path:
    """A folder as it is, or `org/name` fetched from (or found in the cache of) the Hugging Face Hub.

    Raises:
        ConfigurationError: neither; or the Hub does not have it, refuses it or cannot be reached.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if not _HUB_NAME.fullmatch(name_or_path):
        raise ConfigurationError(
            f"model {name_or_path!r} is neither a folder nor a name of the form org/name on the Hugging Face Hub",
            param="model",
        )
    return _fetch(name_or_path)


def _fetch(name: str) -> Path:
    # heavy, and needed only for names
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(name, allow_patterns=list(ALLOWED_PATTERNS), ignore_patterns=list(IGNORED_PATTERNS))
        )
    except HFValidationError as error:
        raise ConfigurationError(
            f"model {name!r} is not a name on the Hugging Face Hub: {error}", param="model"
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"model {name!r} is neither a folder here nor a model on the Hugging Face Hub that this machine may read "
            "(a gated one needs HF_TOKEN)",
            param="model",
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ConfigurationError(
            f"model {name!r} is not a folder here, not in the local cache, and the Hugging Face Hub cannot be reached; "
            "connect, or give the path of a downloaded folder",
            param="model",
        ) from error
