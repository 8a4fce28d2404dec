"""How calls and events are written between a client and its engine process: `[type, fields]` in MessagePack.

The types are plain dataclasses, so that the engine itself needs no serialisation; the name in front tells them apart.
"""

from __future__ import annotations

from typing import Generic, TypeVar, get_args

import msgspec

from loraplex.engine.messages import EngineCall, EngineEvent

Word = TypeVar("Word")

_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw]).decode


def encode(message: EngineCall | EngineEvent) -> bytes:
    return _encode((type(message).__name__, message))


class WordDecoder(Generic[Word]):
    """Decodes the types of one union, strictly."""

    def __init__(self, union: object) -> None:
        self._decoders = {kind.__name__: msgspec.msgpack.Decoder(kind) for kind in get_args(union)}

    def decode(self, message: bytes) -> Word:
        """Read one word.

        Raises:
            msgspec.MsgspecError: it is none of this union.
            LoraplexError: it has a value that its type refuses.
        """
        name, fields = _decode_envelope(message)
        if name not in self._decoders:
            raise msgspec.ValidationError(f"{name!r} is not one of {', '.join(self._decoders)}")
        word: Word = self._decoders[name].decode(fields)
        return word


decode_call = WordDecoder[EngineCall](EngineCall).decode
decode_event = WordDecoder[EngineEvent](EngineEvent).decode


def decode_fields(message: bytes) -> dict[str, object]:
    """The fields of a malformed word as they came; empty when even that cannot be read."""
    try:
        _, fields = msgspec.msgpack.decode(message, type=tuple[str, dict[str, object]])
    except msgspec.MsgspecError:
        return {}
    return fields
