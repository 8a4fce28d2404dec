"""Random identifiers: a kind, an underscore and 96 random bits. No tenant may be named like one."""

from __future__ import annotations

import re
import secrets

_ID = re.compile(r"[a-z]{3}_[0-9a-f]{24}")


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """False for what `new_id` can never have made."""
    return _ID.fullmatch(text) is not None
