"""Random identifiers: a kind, an underscore (which no name may hold) and 96 random bits."""

from __future__ import annotations

import secrets


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
