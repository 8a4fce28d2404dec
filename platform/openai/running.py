"""The requests that are being answered in this process: for cancelling and for the routers' metric."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from loraplex.platform.errors import NotFoundError


class Cancellable(Protocol):
    """A running answer. `cancel` lets it end with `finish_reason: abort`; the client is told."""

    @property
    def request_id(self) -> str: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def adapter_names(self) -> tuple[str, ...]: ...

    @property
    def has_started(self) -> bool:
        """True from the first token on."""
        ...

    def cancel(self) -> None: ...


class RunningRequests:
    def __init__(self) -> None:
        self._running: dict[str, Cancellable] = {}

    def __len__(self) -> int:
        return len(self._running)

    @contextmanager
    def track(self, request: Cancellable) -> Iterator[None]:
        self._running[request.request_id] = request
        try:
            yield
        finally:
            del self._running[request.request_id]

    def cancel(self, request_id: str, *, tenant_id: str) -> None:
        """Raises NotFoundError for an unknown request and for another tenant's, alike."""
        request = self._running.get(request_id)
        if request is None or request.tenant_id != tenant_id:
            raise NotFoundError("no such running request", param="id")
        request.cancel()

    def cancel_all(self) -> None:
        for request in list(self._running.values()):
            request.cancel()

    def running_adapters(self) -> set[str]:
        return {name for request in self._running.values() if request.has_started for name in request.adapter_names}

    def waiting_adapters(self) -> set[str]:
        return {name for request in self._running.values() if not request.has_started for name in request.adapter_names}
