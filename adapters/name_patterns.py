"""PEFT's `rank_pattern` and `alpha_pattern`: the first key that matches a module's name decides.

A key is a regular expression that must match the name's end, at a dot or from the start: `(.*\\.)?(KEY)$`; a key
that begins with ^ therefore matches whole names. Nearly all keys are plain names, which are compared as text. The
others are matched by RE2, linear in the name, and bounded in number and length, so that no upload can stall the
server: what is allowed takes about half a second at worst on a base of 560 modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol, cast

import re2

MAX_PATTERN_CHARS: Final = 512
MAX_REGEX_COST: Final = 2_048  # of all regular expressions of one mapping: characters, and 20 for each

_PLAIN: Final = re.compile(r"[\w.]*", re.ASCII)


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


def pattern_faults(keys: Iterable[str]) -> dict[str, str]:
    """What is wrong with each key that `NamePatterns` cannot take."""
    faults: dict[str, str] = {}
    cost = 0
    for key in keys:
        if _PLAIN.fullmatch(key) and len(key) <= MAX_PATTERN_CHARS:
            continue
        cost += len(key) + 20
        try:
            _compile_key(key)
        except PatternError as error:
            faults[key] = str(error)
        if cost > MAX_REGEX_COST:
            faults[key] = "is one regular expression too many; write plain module names"
            break
    return faults


class NamePatterns:
    """The keys of one pattern mapping, in their order. The keys must be without `pattern_faults`."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._regexes = {key: None if _PLAIN.fullmatch(key) else _compile_key(key) for key in keys}
        self._used: set[str] = set()

    def first_match(self, module_name: str) -> str | None:
        for key, regex in self._regexes.items():
            if regex.match(module_name) if regex is not None else _ends_with(module_name, key):
                self._used.add(key)
                return key
        return None

    @property
    def unused(self) -> Sequence[str]:
        """Keys that have decided about no name so far."""
        return [key for key in self._regexes if key not in self._used]


def _compile_key(key: str) -> _Regex:
    return compile_pattern(rf"(.*\.)?({key})$")


def _ends_with(name: str, key: str) -> bool:
    """What the regular expression of a key of letters and dots decides, a dot standing for any character."""
    start = len(name) - len(key)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    tail = name[start:]
    return tail == key or all(char in (".", other) for char, other in zip(key, tail, strict=True))


@lru_cache(maxsize=1)
def _options() -> object:
    options = re2.Options()
    options.log_errors = False
    options.max_mem = 1 << 20
    return options
