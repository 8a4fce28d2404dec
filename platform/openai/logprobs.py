"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, four parallel lists for text completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Protocol

from loraplex.engine.outputs import TokenLogprobs


class TokenNames(Protocol):
    """How a token is shown."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes the token stands for; None where nobody knows (no tokenizer)."""
        ...


class TokenIdNames:
    """For servers without a tokenizer, and for clients that ask for ids: `token_id:17`."""

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes | None:
        return None


def chat_logprobs(tokens: Iterable[TokenLogprobs], names: TokenNames, *, num_top: int) -> dict[str, Any]:
    return {"content": [_chat_token(token, names, num_top=num_top) for token in tokens], "refusal": None}


def completion_logprobs(
    tokens: Sequence[TokenLogprobs | None],
    names: TokenNames,
    *,
    token_ids: Sequence[int],
    offset: int,
    num_top: int,
) -> dict[str, Any]:
    """`tokens` are those of `token_ids`; None where nothing predicts one (the first of a prompt).

    `offset` is the number of characters in front of them in the text of the choice.
    """
    texts = [names.token_text(token_id) for token_id in token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [None if token is None else token.logprob for token in tokens],
        "top_logprobs": [None if token is None else _top_by_text(token, names, num_top=num_top) for token in tokens],
        "text_offset": list(accumulate((len(text) for text in texts[:-1]), initial=offset)) if texts else [],
    }


def prompt_logprobs(tokens: Iterable[TokenLogprobs | None], names: TokenNames) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt token, token id -> what is known of it."""
    return [None if token is None else _by_token_id(token, names) for token in tokens]


def _chat_token(token: TokenLogprobs, names: TokenNames, *, num_top: int) -> dict[str, Any]:
    top = [_named(token_id, logprob, names) for token_id, logprob in token.top[:num_top]]
    return _named(token.token_id, token.logprob, names) | {"top_logprobs": top}


def _named(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    spelling = names.token_bytes(token_id)
    return {
        "token": names.token_text(token_id),
        "logprob": logprob,
        "bytes": None if spelling is None else list(spelling),
    }


def _top_by_text(token: TokenLogprobs, names: TokenNames, *, num_top: int) -> dict[str, float]:
    """The most likely tokens and the chosen one. Of tokens with one text (halves of characters) the likeliest stays."""
    top: dict[str, float] = {}
    for token_id, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
        top.setdefault(names.token_text(token_id), logprob)
    return top


def _by_token_id(token: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, start=1)]
    known = {}
    for token_id, logprob, rank in (*ranked, (token.token_id, token.logprob, token.rank)):
        known[str(token_id)] = {"logprob": logprob, "rank": rank, "decoded_token": names.token_text(token_id)}
    return known
