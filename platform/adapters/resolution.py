"""What a request asks for, and what the registry made of it: the two values between the API and the registry."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex.adapters.errors import InvalidRequestError
from loraplex.adapters.ref import LoraSelection

MAX_MIX_PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedAdapter:
    """One adapter as a request names it. At most one of `version` and `alias` is set; neither = alias `default`."""

    name: str
    version: int | None = None
    alias: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedAdapter:
    """The version that answers."""

    name: str
    version: int
    digest: str
    weight: float
    version_id: str = ""  # the registry's own key, for references

    @property
    def label(self) -> str:
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSelection:
    """The selection for the engine, and the names for the reply. Empty = the base."""

    selection: LoraSelection
    adapters: tuple[ResolvedAdapter, ...] = ()


def check_number_of_parts(number: int) -> None:
    """Raise InvalidRequestError for a mix of more adapters than one request may have."""
    if number > MAX_MIX_PARTS:
        raise InvalidRequestError(f"a mix of {number} adapters; at most {MAX_MIX_PARTS}", param="lora")
