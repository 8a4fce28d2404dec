"""One piece of text of one choice, as the API needs it."""

from __future__ import annotations

import msgspec

from loraplex.engine.outputs import ErrorInfo, FinishReason, TokenLogprobs


class GenerationChunk(msgspec.Struct, frozen=True, kw_only=True):
    """`text` is the delta since the last chunk of this choice, safe to show: it never holds the beginning of a
    stop string that may still complete, nor half a character. `token_ids` and `logprobs` are the tokens whose
    text this chunk settles; those beyond a stop string are dropped, the one that completed it is kept.
    """

    index: int  # of the choice, 0..n-1
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token id (None for the model's own end)
    error: ErrorInfo | None = None
