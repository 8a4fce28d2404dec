"""What a name means."""

from __future__ import annotations

import pytest

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.naming import check_new_alias, check_new_name, label, parse_adapter_name
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.errors import NotFoundError

HOSTILE_NAMES = [
    "",
    " ",
    "sql ",
    "SQL",
    "../../etc",
    "/etc",
    "..%2f",
    "a/../b",
    "sql\0",
    "sql\n",
    "a" * 64,
    "a" * 10_000,
    "ѕql",  # noqa: RUF001  # a Cyrillic letter: that is the point
    "sql@",
    "sql@0",
    "sql@01",
    "sql@-1",
    "sql@1.0",
    "sql@Prod",
    "sql@prod@1",
    "sql@../x",
    "base:sql",
    "@1",
]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("sql", RequestedAdapter(name="sql")),
        ("sql@3", RequestedAdapter(name="sql", version=3)),
        ("sql@prod", RequestedAdapter(name="sql", alias="prod")),
        ("sql@latest", RequestedAdapter(name="sql", alias="latest")),
        ("0.a_b-c", RequestedAdapter(name="0.a_b-c")),
        ("a" * 63, RequestedAdapter(name="a" * 63)),
    ],
)
def test_a_legal_name_means_a_version_or_an_alias(text: str, meaning: RequestedAdapter) -> None:
    assert parse_adapter_name(text) == meaning
    assert label(meaning) == text


@pytest.mark.parametrize("text", HOSTILE_NAMES)
def test_a_name_outside_the_grammar_does_not_exist(text: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        parse_adapter_name(text)
    assert caught.value.code == "not_found"
    assert len(caught.value.message) < 200, "a long name must not be echoed whole"


@pytest.mark.parametrize("name", ["", "A", "-a", ".a", "a b", "a@b", "a" * 64])
def test_nothing_is_created_under_an_illegal_name(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot name an adapter"):
        check_new_name(name, what="adapter")


@pytest.mark.parametrize("name", ["", "Prod", "1prod", "pro_d", "a" * 33, "latest"])
def test_nothing_is_created_under_an_illegal_alias(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot name an alias"):
        check_new_alias(name)
