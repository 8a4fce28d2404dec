"""JSON as an upload must write it: bounded, no duplicate keys, no NaN, no endless nesting, no half characters."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

from loraplex.adapters.refusals import shown

JsonObject = dict[str, object]


class JsonError(ValueError):
    """Says what is wrong with the text, and where."""


def parse_json_object(data: bytes, *, max_bytes: int, max_items: int = 200_000) -> JsonObject:
    """Parse `data`, which must be one object.

    `max_items` bounds what parsing can allocate: a JSON text has at most about as many values as commas.

    Raises:
        JsonError: with a message that names the fault and its place.
    """
    if len(data) > max_bytes:
        raise JsonError(f"is {len(data)} bytes long; at most {max_bytes} are allowed")
    if data.count(b",") > max_items:
        raise JsonError(f"has more than {max_items} items")
    value = _parse(data)
    if not isinstance(value, dict):
        raise JsonError(f"must be a JSON object, not {_KINDS.get(type(value), 'a number')}")
    return value


_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_KINDS: dict[type, str] = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}


def _parse(data: bytes) -> object:
    try:
        value = json.loads(data, object_pairs_hook=_check_object)
        if _SURROGATE.search(data):  # a pair of them is one character, a lone one no text can hold
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except JsonError:
        raise
    except json.JSONDecodeError as error:
        raise JsonError(f"is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except UnicodeEncodeError as error:
        raise JsonError("holds a lone surrogate, which is half a character") from error
    except UnicodeDecodeError as error:
        raise JsonError(f"is not valid UTF-8 at byte {error.start}") from error
    except RecursionError as error:
        raise JsonError("is nested too deeply") from error
    except ValueError as error:  # an integer with more digits than Python converts
        raise JsonError("holds a number that is too long") from error


def _check_object(pairs: list[tuple[str, object]]) -> JsonObject:
    result = dict(pairs)
    if len(result) < len(pairs):
        [(name, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise JsonError(f"has the key {shown(name)} twice")
    for name, value in pairs:
        # Python's parser accepts NaN and Infinity, and turns 1e999 into the latter.
        if isinstance(value, float) and not math.isfinite(value):
            raise JsonError(f"has {value} for {shown(name)}, which must be finite")
    return result
