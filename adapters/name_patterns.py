"""PEFT's `rank_pattern` and `alpha_pattern`: the first key that matches a module's name decides.

A key is a regular expression that must match the name's end, at a dot or from the start: `(.*\\.)?(KEY)$`; a key
that begins with ^ therefore matches whole names. Matching is RE2's, linear in the name, so that no key of an
upload can stall the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol, cast

import re2

MAX_PATTERN_CHARS = 512


class PatternError(ValueError):
    """A pattern that cannot be compiled; the message says why."""


class _Regex(Protocol):
    def match(self, text: str) -> object | None: ...

    def fullmatch(self, text: str) -> object | None: ...


def compile_pattern(pattern: str) -> _Regex:
    """Compile for linear-time matching.

    Raises:
        PatternError: too long, or RE2 does not know it (look-around, back-references).
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise PatternError(f"is {len(pattern)} characters long; at most {MAX_PATTERN_CHARS} are allowed")
    try:
        return cast(_Regex, re2.compile(pattern, _options()))
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise PatternError(f"is not a regular expression that can be matched in linear time ({reason})") from error


class NamePatterns:
    """The compiled keys of one pattern mapping, in their order."""

    def __init__(self, keys: Iterable[str]) -> None:
        """Raises PatternError."""
        self._regexes = {key: compile_pattern(rf"(.*\.)?({key})$") for key in keys}

    def first_match(self, module_name: str) -> str | None:
        return next((key for key, regex in self._regexes.items() if regex.match(module_name)), None)

    def unmatched(self, module_names: Sequence[str]) -> list[str]:
        """Keys that match none of the names."""
        return [key for key, regex in self._regexes.items() if not any(map(regex.match, module_names))]


@lru_cache(maxsize=1)
def _options() -> object:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    return options
