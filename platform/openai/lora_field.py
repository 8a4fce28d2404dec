"""What a request addresses: the grammar of `model` and `lora`.

    model   = absent | served name | served name ":" adapter | adapter
    lora    = absent | null | part | [part, ...]
    part    = adapter | {"name": name, "version": int | "alias": alias, "weight": number}
    adapter = name | name "@" version | name "@" alias        (`platform.adapters.naming`)

A value of the wrong type is 400; a name that no adapter can have is 404, as any other that does not exist. Nothing
ever falls back to the base. Whether weights and the number of parts are allowed, the registry says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.naming import (
    DEFAULT_ALIAS,
    is_alias_name,
    is_name,
    label,
    parse_adapter_name,
    shown,
    unknown_adapter,
)
from loraplex.platform.adapters.resolution import RequestedAdapter, check_number_of_parts
from loraplex.platform.errors import NotFoundError

MAX_VERSION = 999_999_999

_PART_KEYS = ("name", "version", "alias", "weight")


class LoraConflictError(InvalidRequestError):
    """`model` and `lora` name different adapters."""

    code = "lora_conflict"


class Missing(Enum):
    """Marks a field that the body does not hold, where null has a meaning of its own."""

    ABSENT = auto()


ABSENT = Missing.ABSENT


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """`model` as the client wrote it (or the served name), and the adapters it comes to. No adapters = the base."""

    model: str
    adapters: tuple[RequestedAdapter, ...] = ()


def parse_address(model: str | None, lora: object, *, served_name: str) -> Address:
    """Read `model` and `lora` (ABSENT when the body lacks it) together.

    Raises:
        InvalidRequestError: `lora` has a wrong type or an unknown key.
        LoraConflictError: `model` names an adapter and `lora` something else.
        NotFoundError: no adapter can have that name.
    """
    by_model = parse_model(model, served_name=served_name)
    addressed = served_name if model is None else model
    if lora is ABSENT:
        return Address(model=addressed, adapters=by_model)
    by_lora = parse_lora(lora)
    if by_model and [_identity(part) for part in by_lora] != [_identity(by_model[0])]:
        raise LoraConflictError(_conflict(by_model[0], by_lora), param="lora")
    return Address(model=addressed, adapters=by_lora)


def parse_model(model: str | None, *, served_name: str) -> tuple[RequestedAdapter, ...]:
    """The adapter that `model` names; none for the base."""
    if model is None or model == served_name:
        return ()
    prefix, colon, adapter = model.partition(":")
    if not colon:
        return (_named(model, param="model"),)
    if prefix != served_name:
        raise unknown_adapter(model, param="model")
    return (_named(adapter, param="model"),)


def parse_lora(lora: object) -> tuple[RequestedAdapter, ...]:
    """The adapters that the value of `lora` names; none for null."""
    if lora is None:
        return ()
    if not isinstance(lora, list):
        return (_parse_part(lora, param="lora"),)
    if not lora:
        raise InvalidRequestError("lora is an empty list; name an adapter, or give null for the base", param="lora")
    check_number_of_parts(len(lora))
    return tuple(_parse_part(part, param=f"lora[{index}]") for index, part in enumerate(lora))


def _parse_part(part: object, *, param: str) -> RequestedAdapter:
    if isinstance(part, str):
        return _named(part, param=param)
    if isinstance(part, Mapping):
        return _parse_object(part, param=param)
    raise InvalidRequestError(
        f"{param} must be an adapter's name, an object, a list of those, or null (the base)", param=param
    )


def _parse_object(part: Mapping[str, object], *, param: str) -> RequestedAdapter:
    unknown = [key for key in part if key not in _PART_KEYS]
    if unknown:
        raise InvalidRequestError(
            f"{param} has the unknown key {shown(unknown[0])}; allowed are {', '.join(_PART_KEYS)}", param=param
        )
    name, version, alias = _name(part, param), _version(part, param), _alias(part, param)
    if version is not None and alias is not None:
        raise InvalidRequestError(f"{param} gives version and alias; give one of them", param=param)
    return RequestedAdapter(name=name, version=version, alias=alias, weight=_weight(part, param))


def _name(part: Mapping[str, object], param: str) -> str:
    name = part.get("name")
    if not isinstance(name, str):
        raise InvalidRequestError(f"{param}.name is missing or not a string", param=f"{param}.name")
    if "@" in name:
        raise InvalidRequestError(
            f"{param}.name is {shown(name)}; in an object, version or alias has its own key", param=f"{param}.name"
        )
    if not is_name(name):
        raise unknown_adapter(name, param=f"{param}.name")
    return name


def _version(part: Mapping[str, object], param: str) -> int | None:
    version = part.get("version")
    if version is None:
        return None
    if not isinstance(version, int) or isinstance(version, bool):
        raise InvalidRequestError(f"{param}.version must be an integer", param=f"{param}.version")
    if not 1 <= version <= MAX_VERSION:
        raise unknown_adapter(f"{part['name']}@{version}", param=f"{param}.version")
    return version


def _alias(part: Mapping[str, object], param: str) -> str | None:
    alias = part.get("alias")
    if alias is None:
        return None
    if not isinstance(alias, str):
        raise InvalidRequestError(f"{param}.alias must be a string", param=f"{param}.alias")
    if not is_alias_name(alias):
        raise unknown_adapter(f"{part['name']}@{alias}", param=f"{param}.alias")
    return alias


def _weight(part: Mapping[str, object], param: str) -> float:
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float):
        raise InvalidRequestError(f"{param}.weight must be a number", param=f"{param}.weight")
    try:
        return float(weight)
    except OverflowError:  # an integer beyond every float
        return math.inf


def _named(text: str, *, param: str) -> RequestedAdapter:
    try:
        return parse_adapter_name(text)
    except NotFoundError as error:
        raise NotFoundError(error.message, param=param) from None


def _identity(adapter: RequestedAdapter) -> tuple[str, int | str]:
    return adapter.name, adapter.version or adapter.alias or DEFAULT_ALIAS


def _conflict(by_model: RequestedAdapter, by_lora: tuple[RequestedAdapter, ...]) -> str:
    asked = " + ".join(label(part) for part in by_lora) or "the base (null)"
    return f"model names the adapter {label(by_model)}, but lora asks for {asked}; name the adapter in one of the two"
