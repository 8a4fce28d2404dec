"""Collects everything that is wrong with an upload, so that it is told at once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from loraplex.adapters.errors import AdapterRefusedError, Reason

_MAX_PER_CODE = 20
_MAX_SHOWN_CHARS = 120


def shown(text: str) -> str:
    """A name from an upload as a message may carry it: printable ASCII, quoted, bounded."""
    quoted = ascii(text)
    return quoted if len(quoted) <= _MAX_SHOWN_CHARS else quoted[: _MAX_SHOWN_CHARS - 4] + "...'"


def shown_value(value: object) -> str:
    """A JSON value from an upload, bounded."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


def refused(
    code: str, message: str, *, file: str | None = None, tensor: str | None = None, remedy: str | None = None
) -> AdapterRefusedError:
    """The error for a single fault after which there is nothing more to check."""
    return AdapterRefusedError([Reason(code=code, message=message, file=file, tensor=tensor, remedy=remedy)])


class Refusals:
    """A growing list of reasons. Of one code it keeps the first 20 and counts the rest."""

    def __init__(self) -> None:
        self._reasons: list[Reason] = []
        self._num_by_code: Counter[str] = Counter()

    def __bool__(self) -> bool:
        return bool(self._reasons)

    @property
    def reasons(self) -> list[Reason]:
        """The reasons in the order they were found, then one line per code of which some were left out."""
        left_out = {code: num - _MAX_PER_CODE for code, num in self._num_by_code.items() if num > _MAX_PER_CODE}
        return self._reasons + [
            Reason(code=code, message=f"and {num} more with the code {code}") for code, num in left_out.items()
        ]

    def add(
        self, code: str, message: str, *, file: str | None = None, tensor: str | None = None, remedy: str | None = None
    ) -> None:
        self.add_reason(Reason(code=code, message=message, file=file, tensor=tensor, remedy=remedy))

    def add_reason(self, reason: Reason) -> None:
        self._num_by_code[reason.code] += 1
        if self._num_by_code[reason.code] <= _MAX_PER_CODE:
            self._reasons.append(reason)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Take over the reasons of an AdapterRefusedError raised inside."""
        try:
            yield
        except AdapterRefusedError as error:
            self.extend(error.reasons)

    def extend(self, reasons: Iterable[Reason]) -> None:
        for reason in reasons:
            self.add_reason(reason)

    def raise_if_any(self) -> None:
        if self._reasons:
            raise AdapterRefusedError(self.reasons)
