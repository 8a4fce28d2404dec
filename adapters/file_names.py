"""Which file names an upload may hold, and what becomes of each."""

from __future__ import annotations

from loraplex.adapters.errors import Reason


def check_file_name(name: str) -> Reason | None:
    """Why a file of this name refuses the whole upload (unsafe path, pickle, code), or None."""
    raise NotImplementedError


def is_version_file(name: str) -> bool:
    """Part of the version: stored and hashed (adapter_config.json, weights, index)."""
    raise NotImplementedError


def is_inspected_file(name: str) -> bool:
    """Needed by `inspect_adapter` beside the version's files (tokenizer.json, added_tokens.json); never stored."""
    raise NotImplementedError
