"""How chat completions say it."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.outputs import TokenLogprobs
from loraplex.platform.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from loraplex.platform.openai.replies import GatheredChoice
from loraplex.platform.openai.responses import Body
from loraplex.platform.openai.schemas import ChatCompletionBody

REPLY = "chat.completion"
CHUNK = "chat.completion.chunk"


class ChatDialect:
    def __init__(self, body: ChatCompletionBody, names: TokenNames) -> None:
        self._body = body
        self._names = names

    def deltas(self, chunk: GenerationChunk, *, is_first: bool) -> list[Body]:
        """A choice begins with its role."""
        opening = [self._delta(chunk.index, {"role": "assistant", "content": ""})] if is_first else []
        shown_tokens = chunk.token_ids and (self._body.logprobs or self._body.return_token_ids)
        if not (chunk.text or shown_tokens or chunk.finish_reason):
            return opening
        delta = self._delta(chunk.index, {"content": chunk.text} if chunk.text or shown_tokens else {})
        delta |= {
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": chunk.finish_reason,
            "stop_reason": chunk.stop_reason,
        }
        return [*opening, delta | self._token_ids(chunk.token_ids)]

    def whole(self, choice: GatheredChoice) -> Body:
        body: Body = {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or (), self._names)
        return body | self._token_ids(choice.token_ids)

    def _delta(self, index: int, delta: Body) -> Body:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Body | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(tokens, self._names, num_top=self._body.top_logprobs or 0)

    def _token_ids(self, token_ids: Sequence[int]) -> Body:
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}
