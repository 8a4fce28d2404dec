"""The one tree of errors. Each class has a machine `code`; only the platform knows HTTP statuses.

    LoraplexError
    |-- ClientError               the caller can mend it
    |   |-- InvalidRequestError   a field has a value that is never right
    |   |-- AdapterRefusedError   an upload that must not be served; carries every reason
    |   `-- NeverFitsError        a selection that this server's slots can never hold
    `-- ServerError               the caller did nothing wrong
        `-- AdapterLoadError      files missing, altered or unreadable when a version was to become resident

`engine.errors` and `platform.errors` add their own leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


class LoraplexError(Exception):
    """Root of every error that LoRAplex raises on purpose."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(LoraplexError):
    """The caller can mend it; the message says how."""

    code = "bad_request"


class ServerError(LoraplexError):
    """The caller did nothing wrong."""


class InvalidRequestError(ClientError):
    """A field of a request has a value that is never right."""

    code = "invalid_request"


class NeverFitsError(ClientError):
    """A selection needs more slots than this server can ever free."""

    code = "adapter_never_fits"


class AdapterLoadError(ServerError):
    """A version's files are missing, altered or unreadable."""

    code = "adapter_load_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why an upload is refused.

    `file` and `tensor` name the place; `remedy` tells the uploader what to change.
    """

    code: str
    message: str
    file: str | None = None
    tensor: str | None = None
    remedy: str | None = None


class AdapterRefusedError(ClientError):
    """An upload that must not be served. `reasons` holds everything that is wrong with it."""

    code = "adapter_refused"

    def __init__(self, reasons: Sequence[Reason]) -> None:
        assert reasons, "a refusal needs at least one reason"
        shown = "; ".join(reason.message for reason in reasons[:5])
        rest = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        super().__init__(shown + rest)
        self.reasons = tuple(reasons)
