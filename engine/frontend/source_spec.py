"""How an AdapterSource crosses the process boundary: not pickled, but named and built anew on the other side."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from loraplex.adapters.source import AdapterSource
from loraplex.engine.errors import ConfigurationError


class SourceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`factory` is "package.module:function"; it is called with `options` as keyword arguments.

    `options` are JSON values and may hold credentials: a spec is never logged and only travels over a pipe.
    """

    factory: str
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"SourceSpec(factory={self.factory!r}, options=...)"

    def create(self) -> AdapterSource:
        """Import the factory and call it.

        Raises:
            ConfigurationError: there is no such function.
        """
        module_name, _, function_name = self.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigurationError(f"the adapter source {self.factory!r} cannot be found: {error}") from error
        source: AdapterSource = factory(**self.options)
        return source
