"""How text completions say it. With `echo` a choice begins with its prompt, and so do its log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.outputs import TokenLogprobs
from loraplex.platform.openai.logprobs import TokenNames, completion_logprobs, prompt_logprobs
from loraplex.platform.openai.replies import GatheredChoice
from loraplex.platform.openai.responses import Body
from loraplex.platform.openai.schemas import CompletionBody

REPLY = "text_completion"


class CompletionDialect:
    """`prompts` holds, per prompt, its token ids and the text that `echo` shows."""

    def __init__(self, body: CompletionBody, names: TokenNames, prompts: Sequence[tuple[list[int], str]]) -> None:
        self._body = body
        self._names = names
        self._prompts = prompts
        self._offsets: dict[int, int] = {}  # choice -> characters in front of its next chunk
        self._prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = {}  # by prompt; its first choice has them

    def deltas(self, chunk: GenerationChunk, *, is_first: bool) -> list[Body]:
        choice = GatheredChoice(index=chunk.index)
        choice.add(chunk)
        is_echo = is_first and bool(self._body.echo)
        shown_tokens = chunk.token_ids and (self._body.logprobs is not None or self._body.return_token_ids)
        if not (chunk.text or shown_tokens or chunk.finish_reason or is_echo):
            return []
        return [self._choice(choice, is_echo=is_echo)]

    def whole(self, choice: GatheredChoice) -> Body:
        body = self._choice(choice, is_echo=bool(self._body.echo))
        if self._body.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs or (), self._names)
        return body

    def _choice(self, choice: GatheredChoice, *, is_echo: bool) -> Body:
        prompt_ids, prompt_text = self._prompts[choice.index // self._body.n]
        if choice.prompt_logprobs is not None:
            self._prompt_logprobs[choice.index // self._body.n] = choice.prompt_logprobs
        token_ids = [*prompt_ids, *choice.token_ids] if is_echo else choice.token_ids
        body: Body = {
            "index": choice.index,
            "text": prompt_text + choice.text if is_echo else choice.text,
            "logprobs": self._logprobs(choice, token_ids, is_echo=is_echo),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            body["token_ids"] = list(choice.token_ids)
        return body

    def _logprobs(self, choice: GatheredChoice, token_ids: Sequence[int], *, is_echo: bool) -> Body | None:
        if self._body.logprobs is None:
            return None
        of_prompt = self._prompt_logprobs.get(choice.index // self._body.n, ()) if is_echo else ()
        offset = self._offsets.get(choice.index, 0)
        logprobs = completion_logprobs(
            [*of_prompt, *choice.logprobs],
            self._names,
            token_ids=token_ids,
            offset=offset,
            num_top=self._body.logprobs,
        )
        self._offsets[choice.index] = offset + sum(len(text) for text in logprobs["tokens"])
        return logprobs
