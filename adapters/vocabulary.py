"""Does the upload's tokenizer have tokens that the base has no rows for?"""

from __future__ import annotations

from pathlib import Path

import msgspec

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.errors import AdapterRefusedError
from loraplex.adapters.file_names import INSPECTED_FILES
from loraplex.adapters.folder import open_regular
from loraplex.adapters.refusals import Refusals, shown

_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_TOKENS = 1_000_000  # bounds what decoding can allocate: each token has its colon
_REMEDY = "train without new tokens, or without adding rows to the embeddings"


class _AddedToken(msgspec.Struct):
    id: int
    content: str = ""


class _TokenModel(msgspec.Struct):
    vocab: dict[str, int] = {}


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_AddedToken] = []
    model: msgspec.Raw = msgspec.Raw(b"{}")


def check_vocabulary(folder: Path, base: BaseSpec, refusals: Refusals) -> list[str]:
    """Refuse token ids beyond the base's vocabulary; return warnings about files that could not be read."""
    warnings = []
    for name in sorted(INSPECTED_FILES):
        if not (folder / name).exists():
            continue
        try:
            tokens = _read_tokens(folder / name)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, AdapterRefusedError, OverflowError) as error:
            warnings.append(f"{name} was not checked: {str(error)[:200]}")
            continue
        _refuse_new_tokens(name, tokens, base, refusals)
    return warnings


def _read_tokens(path: Path) -> dict[str, int]:
    with open_regular(path) as file:
        data = file.read(_MAX_TOKENIZER_BYTES + 1)
    if len(data) > _MAX_TOKENIZER_BYTES or data.count(b":") > _MAX_TOKENS:
        raise msgspec.ValidationError("it is too large")
    if path.name == "added_tokens.json":
        return msgspec.json.decode(data, type=dict[str, int])
    tokenizer = msgspec.json.decode(data, type=_Tokenizer)
    return _read_vocab(tokenizer.model) | {token.content: token.id for token in tokenizer.added_tokens}


def _read_vocab(model: msgspec.Raw) -> dict[str, int]:
    """Token ids of a BPE or WordPiece model. Unigram models list their pieces; there only added tokens count."""
    try:
        return msgspec.json.decode(model, type=_TokenModel).vocab
    except msgspec.ValidationError:
        return {}


def _refuse_new_tokens(name: str, tokens: dict[str, int], base: BaseSpec, refusals: Refusals) -> None:
    new = sorted((token_id, token) for token, token_id in tokens.items() if token_id >= base.vocab_size)
    if not new:
        return
    listed = ", ".join(f"{shown(token)} = {token_id}" for token_id, token in new[:5])
    message = f"{name} has {len(new)} tokens beyond the base's vocabulary of {base.vocab_size}: {listed}"
    refusals.add("new_tokens", message, file=name, remedy=_REMEDY)
