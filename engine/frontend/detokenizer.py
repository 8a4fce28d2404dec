"""Turns token ids into text one at a time; the pieces together are exactly the text of all."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol

REPLACEMENT = "\ufffd"
NUM_CONTEXT_TOKENS = 8
MAX_HALF_TOKENS = 3  # a character has at most four bytes


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def has_text(self, token_id: int) -> bool:
        """False for special tokens and ids that the tokenizer does not know: they never show."""
        ...

    def is_byte(self, token_id: int) -> bool:
        """True for the single bytes of a vocabulary with byte fallback."""
        ...


class Detokenizer:
    """Decodes a short window instead of everything, so that a token costs the same at any length.

    A token alone has no text: a space may come from its place, a character may span tokens. So the window begins
    where text was settled a step earlier, and a piece is the growth of the window's text:

        ... settled | prefix (settled too, for context) | open tokens
                    |<------------- window ------------------------>|

    Text stays open while it ends in U+FFFD (half a character) or in a byte of a byte-fallback vocabulary: such a
    run of bytes is text only as a whole, later bytes may turn all of it into U+FFFD.

    The prompt's last tokens are the first prefix: what is said continues the prompt.
    """

    def __init__(self, decoder: Decoder, prompt_token_ids: Sequence[int] = ()) -> None:
        self._decoder = decoder
        self._window = _last_with_text(decoder, prompt_token_ids)
        self._num_prefix = self._num_whole()
        self._prefix_text = self._decode_prefix()
        self._open_text = ""

    @property
    def open_text(self) -> str:
        """What the open tokens would say if nothing came after them."""
        return self._open_text

    def push(self, token_id: int) -> str:
        """Add one token; return the text that it settles, often empty."""
        if not self._decoder.has_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._decoder.decode(self._window)
        self._open_text = text[len(self._prefix_text) :]
        is_open = text.endswith(REPLACEMENT) or self._decoder.is_byte(token_id)
        return "" if is_open else self.flush()

    def flush(self) -> str:
        """Settle the open tokens as they are: no more will come, or none can change them."""
        text, self._open_text = self._open_text, ""
        if text:
            self._window = self._window[self._num_prefix :]
            self._num_prefix = len(self._window)
            self._prefix_text = self._decode_prefix()
        return text

    def _decode_prefix(self) -> str:
        return self._decoder.decode(self._window[: self._num_prefix])

    def _num_whole(self) -> int:
        """Tokens of the prompt before half a character at its end, whose other half the output may bring."""
        size = len(self._window)
        for num_whole in range(size, max(0, size - MAX_HALF_TOKENS) - 1, -1):
            if not self._decoder.decode(self._window[:num_whole]).endswith(REPLACEMENT):
                return num_whole
        return size


def _last_with_text(decoder: Decoder, token_ids: Sequence[int]) -> list[int]:
    """The last NUM_CONTEXT_TOKENS that say something, found from the end: a prompt may be very long."""
    with_text = (token_id for token_id in reversed(token_ids) if decoder.has_text(token_id))
    return list(islice(with_text, NUM_CONTEXT_TOKENS))[::-1]
