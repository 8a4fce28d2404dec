"""A choice's text, tokens and logprobs stay together, and end with the token that completed a stop."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.frontend.choice import Choice
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.chunk_buffer import merge
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from loraplex.engine.sampling_params import SamplingParams
from tests.helpers import make_byte_level_tokenizer, make_sentencepiece_tokenizer

MERGES = (("h", "e"), ("l", "l"), ("ll", "o"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_byte_level_tokenizer(tmp_path_factory.mktemp("byte"), merges=MERGES))


def create_choice(tokenizer: Tokenizer | None, **params: object) -> Choice:
    return Choice(index=0, prompt_token_ids=[1], params=SamplingParams(**params), tokenizer=tokenizer)  # type: ignore[arg-type]  # each test knows its fields


def outputs_of(token_ids: list[int], *, cuts: list[int] | None = None) -> list[RequestOutput]:
    """The tokens as an engine says them, one by one or cut at `cuts`; the last output ends by length."""
    edges = sorted({0, len(token_ids), *(range(len(token_ids)) if cuts is None else cuts)})
    return [
        RequestOutput(
            request_id="r",
            new_token_ids=tuple(token_ids[start:end]),
            new_logprobs=tuple(TokenLogprobs(token_id, -1.0, 1) for token_id in token_ids[start:end]),
            finish_reason=FinishReason.LENGTH if end == len(token_ids) else None,
        )
        for start, end in pairwise(edges)
    ]


def chunks_of(choice: Choice, outputs: list[RequestOutput]) -> list[GenerationChunk]:
    chunks = []
    for output in outputs:
        if chunk := choice.push(output):
            chunks.append(chunk)
        if choice.is_finished:
            break
    return chunks


def whole(chunks: list[GenerationChunk]) -> GenerationChunk:
    total = chunks[0]
    for chunk in chunks[1:]:
        total = merge(total, chunk)
    return total


def test_a_stop_string_across_tokens_never_leaks_and_ends_with_its_last_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("say hello to all")
    chunks = chunks_of(create_choice(tokenizer, stop=("ello t",)), outputs_of(token_ids))
    total = whole(chunks)
    assert total.text == "say h"
    assert (total.finish_reason, total.stop_reason) == (FinishReason.STOP, "ello t")
    assert tokenizer.decode(total.token_ids) == "say hello t"
    assert [entry.token_id for entry in total.logprobs] == list(total.token_ids)
    assert all("e" not in chunk.text for chunk in chunks)


def test_a_stop_string_can_be_included(tokenizer: Tokenizer) -> None:
    choice = create_choice(tokenizer, stop=("lo",), include_stop_str_in_output=True)
    assert whole(chunks_of(choice, outputs_of(tokenizer.encode("hello!")))).text == "hello"


def test_tokens_beyond_the_stop_in_one_output_are_dropped(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("ab.cd")
    total = whole(chunks_of(create_choice(tokenizer, stop=(".",)), outputs_of(token_ids, cuts=[])))
    assert (total.text, list(total.token_ids)) == ("ab", token_ids[:3])


def test_what_only_looked_like_a_stop_is_said_at_the_end(tokenizer: Tokenizer) -> None:
    total = whole(chunks_of(create_choice(tokenizer, stop=("hello!",)), outputs_of(tokenizer.encode("hello"))))
    assert (total.text, total.finish_reason) == ("hello", FinishReason.LENGTH)


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    choice = create_choice(tokenizer, stop=("a",), min_tokens=2)
    total = whole(chunks_of(choice, outputs_of(tokenizer.encode("abca!"))))
    assert (total.text, total.stop_reason) == ("abc", "a")


def test_a_byte_that_stops_does_so_at_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    pieces = Tokenizer.from_folder(make_sentencepiece_tokenizer(tmp_path_factory.mktemp("piece")))
    token_ids = pieces.encode("he\nhe", add_special_tokens=False)
    total = whole(chunks_of(create_choice(pieces, stop=("\n",)), outputs_of(token_ids)))
    assert (total.text, len(total.token_ids)) == (" he", 3)  # ▁, he, <0x0A>


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_is_counted_and_shown_only_on_request(tokenizer: Tokenizer, include: bool, text: str) -> None:
    a, b = tokenizer.encode("ab")
    choice = create_choice(tokenizer, stop_token_ids=(b,), include_stop_str_in_output=include)
    chunk = choice.push(
        RequestOutput(request_id="r", new_token_ids=(a, b), finish_reason=FinishReason.STOP, stop_token_id=b)
    )
    assert chunk is not None
    assert (chunk.text, chunk.token_ids, chunk.stop_reason) == (text, (a, b), b)


def test_the_models_own_end_has_no_stop_reason(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.encode("<|end|>")
    chunk = create_choice(tokenizer).push(
        RequestOutput(request_id="r", new_token_ids=(end,), finish_reason=FinishReason.STOP, stop_token_id=end)
    )
    assert chunk is not None
    assert (chunk.text, chunk.token_ids, chunk.stop_reason) == ("", (end,), None)


def test_without_a_tokenizer_tokens_pass_at_once() -> None:
    choice = create_choice(None)
    assert [chunk.token_ids for chunk in chunks_of(choice, outputs_of([5, 6, 7]))] == [(5,), (6,), (7,)]


def test_tokens_come_with_the_chunk_that_settles_their_text(tokenizer: Tokenizer) -> None:
    chunks = chunks_of(create_choice(tokenizer), outputs_of(tokenizer.encode("a😀b")))
    assert [(chunk.text, len(chunk.token_ids)) for chunk in chunks] == [("a", 1), ("😀", 4), ("b", 1)]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_answer_does_not_depend_on_how_outputs_are_cut(tokenizer: Tokenizer, data: st.DataObject) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size), min_size=1, max_size=15))
    cuts = data.draw(st.lists(st.integers(0, len(token_ids))))
    stop = tuple(data.draw(st.lists(st.text("abhelo", min_size=1, max_size=3), max_size=2)))
    one_by_one, cut = (
        whole(chunks_of(create_choice(tokenizer, stop=stop), outputs_of(token_ids, cuts=where)))
        for where in (None, cuts)
    )
    assert (one_by_one.text, one_by_one.token_ids) == (cut.text, cut.token_ids)
    assert one_by_one.logprobs == cut.logprobs
    if one_by_one.finish_reason is FinishReason.LENGTH:
        assert (one_by_one.text, list(one_by_one.token_ids)) == (tokenizer.decode(token_ids), token_ids)
