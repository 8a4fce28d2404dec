"""One choice on its way from token ids to text that may be shown."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.detokenizer import Detokenizer
from loraplex.engine.frontend.stop_strings import StopMatch, StopStrings
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from loraplex.engine.sampling_params import SamplingParams


class _Token(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    end: int  # characters of the choice's text up to and with this token


class Choice:
    """Turns the engine's outputs of one request into chunks: detokenizes, finds stop strings, settles tokens.

    A token is given out with the chunk that shows the last of its text, so text, tokens and logprobs of the chunks
    seen so far always belong together.
    """

    def __init__(
        self, *, index: int, prompt_token_ids: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None
    ) -> None:
        self._index = index
        self._params = params
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids) if tokenizer else None
        self._stop_strings = StopStrings(params.stop)
        self._num_tokens = 0
        self._num_settled = 0  # characters that the detokenizer has settled
        self._num_shown = 0
        self._open: list[_Token] = []  # their text is not settled; `end` not known yet
        self._waiting: deque[_Token] = deque()  # their text is settled, but not shown yet
        self.is_finished = False

    def push(self, output: RequestOutput) -> GenerationChunk | None:
        """The chunk that comes of an output; None when there is nothing to show yet."""
        text = ""
        for position, token_id in enumerate(output.new_token_ids):
            logprobs = output.new_logprobs[position] if output.new_logprobs else None
            is_last = position == len(output.new_token_ids) - 1
            is_silent = is_last and output.stop_token_id is not None and not self._params.include_stop_str_in_output
            piece, match = self._push_token(token_id, logprobs, is_silent=is_silent)
            text += piece
            if match:
                return self._finish(output, text, FinishReason.STOP, match.stop)
        if output.finish_reason:
            text += self._flush()
            return self._finish(output, text, output.finish_reason, self._engine_stop_reason(output))
        return self._chunk(output, text)

    def _push_token(
        self, token_id: int, logprobs: TokenLogprobs | None, *, is_silent: bool
    ) -> tuple[str, StopMatch | None]:
        """Text to show after one more token, and the stop string that it completed."""
        self._num_tokens += 1
        self._open.append(_Token(token_id, logprobs, 0))
        if self._detokenizer is None or is_silent:
            return "", None
        settled = self._detokenizer.push(token_id)
        open_text = self._detokenizer.open_text
        if self._num_tokens > self._params.min_tokens and (match := self._stop_strings.find(settled + open_text)):
            return match.text + (match.stop if self._params.include_stop_str_in_output else ""), match
        return self._settle(settled, is_open=bool(open_text)), None

    def _settle(self, settled: str, *, is_open: bool) -> str:
        self._num_settled += len(settled)
        if not is_open:
            end = self._num_settled
            self._waiting.extend(_Token(token_id, logprobs, end) for token_id, logprobs, _ in self._open)
            self._open.clear()
        return self._stop_strings.push(settled)

    def _flush(self) -> str:
        """The engine ended the choice: what was held back is text after all."""
        rest = self._detokenizer.flush() if self._detokenizer else ""
        return self._settle(rest, is_open=False) + self._stop_strings.flush()

    def _finish(
        self, output: RequestOutput, text: str, finish_reason: FinishReason, stop_reason: str | int | None
    ) -> GenerationChunk:
        self.is_finished = True
        tokens = [*self._waiting, *self._open]
        return self._make_chunk(output, text, tokens, finish_reason=finish_reason, stop_reason=stop_reason)

    def _chunk(self, output: RequestOutput, text: str) -> GenerationChunk | None:
        self._num_shown += len(text)
        tokens = []
        if self._detokenizer is None:
            tokens, self._open = self._open, []
        while self._waiting and self._waiting[0].end <= self._num_shown:
            tokens.append(self._waiting.popleft())
        if not (text or tokens or output.prompt_logprobs):
            return None
        return self._make_chunk(output, text, tokens)

    def _make_chunk(
        self,
        output: RequestOutput,
        text: str,
        tokens: Sequence[_Token],
        *,
        finish_reason: FinishReason | None = None,
        stop_reason: str | int | None = None,
    ) -> GenerationChunk:
        return GenerationChunk(
            index=self._index,
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(token.logprobs for token in tokens if token.logprobs),
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            error=output.error,
        )

    def _engine_stop_reason(self, output: RequestOutput) -> int | None:
        """A stop token of the caller's; the model's own end has no name."""
        return output.stop_token_id if output.stop_token_id in self._params.stop_token_ids else None
