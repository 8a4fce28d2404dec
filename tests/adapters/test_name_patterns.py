from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loraplex.adapters.name_patterns import MAX_REGEX_COST, NamePatterns, pattern_faults

NAMES = st.text("ab._x1", min_size=1, max_size=12)
KEYS = st.lists(st.text("ab._x1", max_size=6) | st.from_regex(r"[ab.(|)*^]{0,6}", fullmatch=True), max_size=4)


def peft_choice(keys: list[str], name: str) -> str | None:
    """The rule as PEFT states it."""
    return next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), None)


@given(keys=KEYS, name=NAMES)
@example(keys=["q.proj"], name="layers.0.q_proj")
@example(keys=["proj"], name="layers.0.q_proj")
@example(keys=[""], name="a.")
@example(keys=["^a.b"], name="x.a.b")
@settings(max_examples=400, deadline=None)
def test_the_choice_is_pefts(keys: list[str], name: str) -> None:
    try:
        for key in keys:
            re.compile(rf"(.*\.)?({key})$")
    except re.error:
        return
    keys = list(dict.fromkeys(keys))
    if not pattern_faults(keys):
        assert NamePatterns(keys).first_match(name) == peft_choice(keys, name)


def test_a_key_that_decided_nothing_is_told() -> None:
    patterns = NamePatterns(["q_proj", "layers.0.q_proj", "(k|v)_proj", "nothing"])
    for name in ("layers.0.q_proj", "layers.0.v_proj"):
        patterns.first_match(name)
    assert patterns.unused == ["layers.0.q_proj", "nothing"]


def test_any_number_of_plain_names_is_allowed() -> None:
    assert pattern_faults([f"model.layers.{i}.self_attn.q_proj" for i in range(2_000)]) == {}


def test_regular_expressions_are_bounded_together() -> None:
    faults = pattern_faults([f"a{i}*" for i in range(MAX_REGEX_COST)])
    assert len(faults) == 1
    assert "one regular expression too many" in next(iter(faults.values()))


@pytest.mark.parametrize("key", ["(a+)+$", "(.*.*.*.*.*.*.*.*)*x", "(x+x+)+y"])
def test_a_catastrophic_pattern_is_matched_in_linear_time(key: str) -> None:
    assert pattern_faults([key]) == {}
    assert NamePatterns([key]).first_match("model." + "xa" * 5_000 + "!") is None
