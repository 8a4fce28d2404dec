"""The model folder's own tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.tokenizer import Tokenizer
from tests.helpers import make_byte_level_tokenizer, make_checkpoint, make_sentencepiece_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_byte_level_tokenizer(tmp_path_factory.mktemp("byte")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(make_sentencepiece_tokenizer(tmp_path_factory.mktemp("piece")))


def test_a_folder_without_a_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match="--skip-tokenizer-init"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigurationError, match="cannot be loaded"):
        Tokenizer.from_folder(tmp_path)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_bytes_of_the_tokens_are_the_bytes_of_the_text(byte_level: Tokenizer, text: str) -> None:
    token_ids = byte_level.encode(text, add_special_tokens=False)
    assert b"".join(byte_level.token_bytes(token_id) for token_id in token_ids) == text.encode()


def test_token_bytes_of_a_vocabulary_with_byte_fallback(sentencepiece: Tokenizer) -> None:
    token_ids = sentencepiece.encode("he 中", add_special_tokens=False)
    assert b"".join(sentencepiece.token_bytes(token_id) for token_id in token_ids) == " he 中".encode()


def test_half_a_character_and_unknown_ids_have_a_token_text(byte_level: Tokenizer) -> None:
    first = byte_level.encode("😀")[0]
    assert byte_level.token_bytes(first) == b"\xf0"
    assert byte_level.token_text(first) == "\ufffd"
    assert byte_level.token_text(100_000) == byte_level.token_text(-1) == ""
    assert byte_level.token_text(byte_level.encode("<|end|>")[0]) == "<|end|>"


def test_a_conversation_is_rendered_with_the_models_own_template(byte_level: Tokenizer) -> None:
    token_ids = byte_level.apply_chat_template([{"role": "user", "content": "hi"}])
    assert byte_level.decode(token_ids) == "<|user|>hi\n<|assistant|>"


def test_a_model_without_template_and_a_template_that_fails_are_bad_requests(tmp_path: Path) -> None:
    make_byte_level_tokenizer(tmp_path)
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('only one message, please') }}")
    with pytest.raises(InvalidRequestError, match="only one message, please"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
    template.write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError, match="unsafe"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
    template.unlink()
    with pytest.raises(InvalidRequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}])
