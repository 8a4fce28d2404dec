"""The key under which a full KV block is found again.

A key names everything that the KV values of a block depend on, so that equal keys mean equal KV: the block's token
ids, all tokens before it (through the parent's key) and the selection in force. The hash is BLAKE2b with 256 bits,
keyed with the tenant's random salt, so that no tenant can find, or even guess, a key of another. Every field is
typed and length-prefixed: no two different lists of fields have the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

MAX_SALT_BYTES = hashlib.blake2b.MAX_KEY_SIZE
_KEY_BYTES = 32

_PARENT = b"P"
_TOKENS = b"T"
_SELECTION = b"S"


def hash_block(
    *, parent: bytes | None, token_ids: Sequence[int], selection_digest: bytes, cache_salt: bytes = b""
) -> bytes:
    """32 bytes for one full block.

    `parent` is the key of the block before it (None for the first), `selection_digest` is empty for the base,
    `cache_salt` has at most `MAX_SALT_BYTES`.
    """
    tokens = struct.pack(f"<{len(token_ids)}q", *token_ids)
    message = b"".join(
        (_field(_PARENT, parent or b""), _field(_TOKENS, tokens), _field(_SELECTION, selection_digest)),
    )
    return hashlib.blake2b(message, digest_size=_KEY_BYTES, key=cache_salt).digest()


def _field(kind: bytes, payload: bytes) -> bytes:
    return kind + struct.pack("<Q", len(payload)) + payload
