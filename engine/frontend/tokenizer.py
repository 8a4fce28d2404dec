"""Text to token ids and back, as the base model's own tokenizer does it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BackendTokenizer
    from transformers import PreTrainedTokenizerBase

# transformers invents an empty tokenizer for some model types when a folder has none of these.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokenizer:
    """The tokenizer of a model folder; never runs code from it and never asks the network."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: BackendTokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        self._decoders = _decoder_types(self._backend)
        self._vocab_size = len(tokenizer)
        added, vocabulary = tokenizer.added_tokens_decoder, tokenizer.get_vocab()
        self._added_ids = frozenset(added)
        self._text_ids = frozenset(vocabulary.values()) - {
            token_id for token_id, token in added.items() if token.special
        }
        self._byte_ids = _byte_ids(vocabulary) if "ByteFallback" in self._decoders else frozenset()
        self._longest_token = max(map(len, vocabulary), default=1)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Load the tokenizer of a model folder.

        Raises:
            ConfigurationError: the folder has none, or it cannot be read.
        """
        from transformers import AutoTokenizer  # takes seconds: only who needs a tokenizer pays

        folder = Path(folder)
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigurationError(
                f"{folder} has no tokenizer ({', '.join(TOKENIZER_FILES)}); add its files, or skip the tokenizer "
                "(--skip-tokenizer-init) and send token ids",
                param="skip_tokenizer_init",
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever a broken file raises in transformers
            raise ConfigurationError(f"the tokenizer in {folder} cannot be loaded: {error}", param="model") from error
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def longest_token(self) -> int:
        """Characters: a text of N has at least N / longest_token tokens."""
        return self._longest_token

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the tokens without special ones, byte for byte: no clean-up of spaces."""
        if self._backend is not None:  # where transformers' decode ends; on the way it takes four times as long
            return self._backend.decode(list(token_ids), skip_special_tokens=True)
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Render the conversation with the model's own template (in transformers' Jinja sandbox) to token ids.

        Raises:
            InvalidRequestError: the model has no template, or the template refuses these messages.
        """
        if not self.has_chat_template:
            raise InvalidRequestError("this model has no chat template; use /v1/completions", param="messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **(template_kwargs or {}),
            )
        except Exception as error:  # a template is a program of the model's author and raises what it likes
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        assert isinstance(text, str)
        return self.encode(text, add_special_tokens=False)  # templates write their own

    def has_text(self, token_id: int) -> bool:
        return token_id in self._text_ids

    def is_byte(self, token_id: int) -> bool:
        return token_id in self._byte_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for wherever it occurs; half characters and special tokens included."""
        token = self._token(token_id)
        if token is None:
            return b""
        if token_id in self._added_ids:
            return token.encode()
        if "ByteLevel" in self._decoders:
            return b"".join(_BYTE_OF.get(char, char.encode()) for char in token)
        if self.is_byte(token_id):
            return bytes.fromhex(token[3:5])
        return token.replace("▁", " ").encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _token(self, token_id: int) -> str | None:
        token = self._tokenizer.convert_ids_to_tokens(token_id) if 0 <= token_id < self._vocab_size else None
        return token if isinstance(token, str) else None


def _decoder_types(backend: BackendTokenizer | None) -> frozenset[str]:
    """Names of the steps by which the vocabulary's tokens become text, e.g. ByteLevel or ByteFallback."""
    if backend is None or backend.decoder is None:
        return frozenset()
    decoder = json.loads(backend.decoder.__getstate__())
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))


def _byte_ids(vocabulary: Mapping[str, int]) -> frozenset[int]:
    return frozenset(token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token))


def _byte_of() -> dict[str, bytes]:
    """The alphabet of byte-level BPE: printable bytes are themselves, the others the code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    chars = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
    return {char: bytes([byte]) for char, byte in zip(chars, printable + others, strict=True)}


_BYTE_OF = _byte_of()
