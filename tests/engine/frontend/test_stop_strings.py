"""Stop strings: found wherever tokens cut them, and never shown, not even their beginnings."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.engine.frontend.stop_strings import StopMatch, StopStrings


def feed(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """All that is shown of the pieces, and the stop that ended them."""
    matcher, shown = StopStrings(stops), ""
    for piece in pieces:
        if match := matcher.find(piece):
            return shown + match.text, match.stop
        shown += matcher.push(piece)
    return shown + matcher.flush(), None


def test_a_stop_that_spans_pieces_never_leaks() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.push("hello<") == "hello"
    assert matcher.push("/en") == ""
    assert matcher.find("d> more") == StopMatch("</end>", "")


def test_what_looked_like_a_stop_is_shown_when_it_is_none() -> None:
    matcher = StopStrings(["</end>"])
    assert matcher.push("a</e") == "a"
    assert matcher.push("lse") == "</else"
    assert matcher.push("b<") == "b"
    assert matcher.flush() == "<"


def test_the_stop_that_completes_first_wins_and_of_those_the_longest() -> None:
    assert feed(("cd", "abc"), ["xabcd"]) == ("x", "abc")
    assert feed(("bc", "abc"), ["xabcd"]) == ("x", "abc")


@settings(max_examples=300, deadline=None)
@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3).map(tuple),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_answer_does_not_depend_on_how_the_text_was_cut(stops: tuple[str, ...], pieces: list[str]) -> None:
    text, stop = feed(stops, pieces)
    assert (text, stop) == feed(stops, list("".join(pieces)))
    assert not any(stop in text for stop in stops)
