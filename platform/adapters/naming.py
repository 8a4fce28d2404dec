"""What a name means: the grammar of tenant, adapter and alias names, and of `name`, `name@3`, `name@prod`.

A name outside the grammar cannot exist, so where one is looked up it is unknown like any other (404 with the same
words); where one is created it is refused with the rule (400).
"""

from __future__ import annotations

import json
import re

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.resolution import RequestedAdapter
from loraplex.platform.errors import NotFoundError

DEFAULT_ALIAS = "default"
LATEST_ALIAS = "latest"
RESERVED_ALIASES = frozenset({DEFAULT_ALIAS, LATEST_ALIAS})  # always there, never deleted

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ALIAS = re.compile(r"[a-z][a-z0-9-]{0,31}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_SHOWN_CHARS = 80  # of a name in a message, whatever its length


def parse_adapter_name(text: str) -> RequestedAdapter:
    """Read `name`, `name@3`, `name@prod` or `name@latest`.

    Raises:
        NotFoundError: the text is outside the grammar, so no adapter can have that name.
    """
    name, at, suffix = text.partition("@")
    if not is_name(name):
        raise unknown_adapter(text)
    if not at:
        return RequestedAdapter(name=name)
    if _VERSION.fullmatch(suffix):
        return RequestedAdapter(name=name, version=int(suffix))
    if is_alias_name(suffix):
        return RequestedAdapter(name=name, alias=suffix)
    raise unknown_adapter(text)


def is_name(text: str) -> bool:
    """True for what a tenant or an adapter may be called."""
    return _NAME.fullmatch(text) is not None


def is_alias_name(text: str) -> bool:
    return _ALIAS.fullmatch(text) is not None


def check_new_name(text: str, *, what: str) -> None:
    """Raise InvalidRequestError unless a `what` ("tenant", "adapter") may be created under this name."""
    if not is_name(text):
        raise InvalidRequestError(
            f"{shown(text)} cannot name {_article(what)}: use 1 to 63 of a-z, 0-9, '.', '_', '-', "
            "beginning with a letter or digit",
            param="name",
        )


def check_version_digits(text: str) -> str:
    """`text` itself. Raises ValueError unless it is a version number as it is always written: no sign, no zeros."""
    if not _VERSION.fullmatch(text):
        raise ValueError("a version is a number from 1 on")
    return text


def check_new_alias(text: str) -> None:
    """Raise InvalidRequestError unless an alias may be created under this name."""
    if not is_alias_name(text) or text == LATEST_ALIAS:
        raise InvalidRequestError(
            f"{shown(text)} cannot name an alias: use 1 to 32 of a-z, 0-9, '-', beginning with a letter; "
            f"'{LATEST_ALIAS}' always is the newest version",
            param="alias",
        )


def unknown_adapter(text: str, *, param: str = "lora") -> NotFoundError:
    """The one answer for what does not exist, is another tenant's, or cannot exist."""
    return NotFoundError(f"the adapter {shown(text)} does not exist", param=param)


def label(requested: RequestedAdapter) -> str:
    """The requested adapter as its user wrote it: `name`, `name@3` or `name@prod`."""
    suffix = requested.alias if requested.version is None else str(requested.version)
    return requested.name if suffix is None else f"{requested.name}@{suffix}"


def shown(text: str) -> str:
    """`text` as a JSON string for a message: escaped, and cut when it is absurdly long."""
    return json.dumps(text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "...")


def _article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
