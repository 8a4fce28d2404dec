"""Pieces of text must add up to the text of all tokens, whatever the tokens are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.frontend.detokenizer import NUM_CONTEXT_TOKENS, Detokenizer
from loraplex.engine.frontend.tokenizer import Tokenizer
from tests.helpers import make_byte_level_tokenizer, make_sentencepiece_tokenizer

KINDS = ("byte_level", "sentencepiece")
MERGES = (("h", "e"), ("l", "l"), ("ll", "o"), ("Ã", "©"), ("Ġ", "w"), ("ð", "Ł"))

_made: dict[str, Tokenizer] = {}


@pytest.fixture(scope="module", autouse=True)
def _tokenizers(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("tokenizers")
    _made["byte_level"] = Tokenizer.from_folder(make_byte_level_tokenizer(folder / "byte", merges=MERGES))
    _made["sentencepiece"] = Tokenizer.from_folder(make_sentencepiece_tokenizer(folder / "piece"))


def pieces(tokenizer: Tokenizer, token_ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_pieces_of_random_tokens_add_up_to_the_text_of_all(kind: str, data: st.DataObject) -> None:
    tokenizer = _made[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    assert "".join(pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("he lloé😀▁\n")), max_size=30))
def test_pieces_of_a_text_are_whole_characters_and_add_up_to_it(kind: str, text: str) -> None:
    tokenizer = _made[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    said = pieces(tokenizer, token_ids)
    assert "".join(said) == tokenizer.decode(token_ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in said)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_the_output_continues_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = _made[kind]
    text = data.draw(st.text(alphabet="he lloé😀", max_size=20))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(token_ids)))
    prompt = tokenizer.decode(token_ids[:cut])
    if not prompt.endswith("\ufffd"):
        said = "".join(pieces(tokenizer, token_ids[cut:], tuple(token_ids[:cut])))
        assert prompt + said == tokenizer.decode(token_ids)


def test_half_a_character_of_the_prompt_is_said_with_its_other_half() -> None:
    tokenizer = _made["byte_level"]
    token_ids = tokenizer.encode("a😀b")
    assert "".join(pieces(tokenizer, token_ids[2:], tuple(token_ids[:2]))) == "😀b"


def test_a_space_before_a_word_survives_after_a_prompt() -> None:
    tokenizer = _made["sentencepiece"]
    prompt = tuple(tokenizer.encode("hello", add_special_tokens=False))
    said = tokenizer.encode("wor", add_special_tokens=False)
    assert "".join(pieces(tokenizer, said, prompt)) == " wor"
    assert "".join(pieces(tokenizer, said)) == "wor"


def test_special_tokens_are_silent() -> None:
    tokenizer = _made["byte_level"]
    end = tokenizer.encode("<|end|>")
    assert len(end) == 1
    assert pieces(tokenizer, [*tokenizer.encode("he"), *end]) == ["he", "", ""]


def test_the_window_does_not_grow_with_the_text() -> None:
    tokenizer = _made["byte_level"]
    longest = 0

    class Counting:
        has_text, is_byte = tokenizer.has_text, tokenizer.is_byte

        def decode(self, token_ids: list[int]) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return tokenizer.decode(token_ids)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]  # a list is all it is given
    for token_id in tokenizer.encode("hello wörld 😀 " * 50):
        detokenizer.push(token_id)
    assert longest <= 8


def test_the_end_of_a_long_prompt_is_found_from_its_end() -> None:
    asked: list[int] = []

    class Counting:
        def decode(self, token_ids: Sequence[int]) -> str:
            return "x" * len(token_ids)

        def has_text(self, token_id: int) -> bool:
            asked.append(token_id)
            return token_id % 2 == 0

        def is_byte(self, token_id: int) -> bool:
            return False

    Detokenizer(Counting(), range(100_000))
    assert len(asked) <= 2 * NUM_CONTEXT_TOKENS
