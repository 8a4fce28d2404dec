"""Runs requests through an EngineCore of this thread, all in one batch, until every one has ended."""

from __future__ import annotations

import time
from collections.abc import Sequence

from loraplex.engine.core.engine_core import EngineCore
from loraplex.engine.frontend.children import split_choices
from loraplex.engine.frontend.choice import Choice
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.chunk_buffer import merge
from loraplex.engine.frontend.session import error_of
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.messages import GenerateRequest
from loraplex.engine.outputs import RequestOutput

STALLED_SLEEP_S = 0.001  # nothing to compute: adapters are on their way


class OfflineBatch:
    """One batch of requests; their choices come back whole, in order."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._tokenizer = tokenizer
        self._choices: dict[str, Choice] = {}  # by the engine's request id; those that are not finished
        self._answers: dict[str, GenerationChunk] = {}

    def run(self, requests: Sequence[GenerateRequest]) -> list[list[GenerationChunk]]:
        """One chunk per choice and request: everything that was said.

        Raises the LoraplexError by which the engine refused or failed a request; the others are aborted then.
        """
        families = [split_choices(request) for request in requests]
        try:
            for family in families:
                for index, child in enumerate(family):
                    self._add(index, child)
            self._finish_all()
        finally:
            self._abort_all()
        return [[self._answers[child.request_id] for child in family] for family in families]

    def _add(self, index: int, request: GenerateRequest) -> None:
        self._choices[request.request_id] = Choice(
            index=index,
            prompt_token_ids=request.prompt_token_ids,
            params=request.sampling_params,
            tokenizer=self._tokenizer,
        )
        self._core.add_request(request)

    def _finish_all(self) -> None:
        while self._choices:
            for output in self._core.step():
                self._take(output)
            if self._core.is_stalled:
                time.sleep(STALLED_SLEEP_S)

    def _take(self, output: RequestOutput) -> None:
        request_id = output.request_id
        choice = self._choices.get(request_id)
        if choice is None:  # ended by a stop string: what the engine says of the abort is not news
            return
        if output.error:
            raise error_of(output.error)
        if chunk := choice.push(output):
            earlier = self._answers.get(request_id)
            self._answers[request_id] = merge(earlier, chunk) if earlier else chunk
        if choice.is_finished:
            del self._choices[request_id]
            if not output.finish_reason:
                self._core.abort([request_id])

    def _abort_all(self) -> None:
        """Leave nothing behind: also what a refused request or a Ctrl-C interrupted."""
        self._core.abort(list(self._choices))
        self._choices.clear()
        while self._core.scheduler.num_requests:
            self._core.step()
