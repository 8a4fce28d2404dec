"""docs/cases.md names tests that exist, and leaves out no case."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENT = (ROOT / "docs" / "cases.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py(?:::\w+)+)`", DOCUMENT)))
SERVED = {
    "LD": (1, 2, 4, 5, 7, 8, 14, 17, 19, 20, 21, 22, 23, 25, 27),
    "KN": (1, 2, 6, 7),
    "CA": (1, 2, 3, 4, 6, 8, 9, 10),
    "SC": (1, 2, 4, 5, 7),
    "AP": (1, 2, 3, 5, 7, 8, 9, 11, 12, 17, 18, 19),
    "SE": (1, 3, 4, 5),
    "TE": (1,),
    "OP": (1, 2, 6),
}
REFUSED = ("LD-09", "LD-10", "LD-11", "LD-13", "LD-14", "LD-16")


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """`test_name` and `TestClass::test_name` of one file."""
    body = ast.parse((ROOT / path).read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    return frozenset(_functions(body) + [f"{one.name}::{name}" for one in classes for name in _functions(one.body)])


def _functions(body: list[ast.stmt]) -> list[str]:
    return [node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@pytest.mark.parametrize("named", NAMED)
def test_every_test_that_the_cases_name_exists(named: str) -> None:
    path, _, name = named.partition("::")
    assert name in names_in(path)


@pytest.mark.parametrize("case", [f"{area}-{number:02}" for area, numbers in SERVED.items() for number in numbers])
def test_every_case_names_a_test(case: str) -> None:
    (row,) = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {case} |")]
    assert re.search(r"`tests/\S+`", row)


@pytest.mark.parametrize("case", REFUSED)
def test_every_case_that_is_refused_for_now_is_said_to_be(case: str) -> None:
    (paragraph,) = [part for part in DOCUMENT.split("\n\n") if part.startswith("Refused for now")]
    assert f"({case})" in paragraph
