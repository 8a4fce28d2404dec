"""Counts the requests that run in each tenant, so that a tenant can be emptied before it is removed."""

from __future__ import annotations

import asyncio
from collections import Counter

from loraplex.platform.tenants.context import no_such_tenant


class RequestsInFlight:
    """Of this process. A closed tenant takes no new request, for good: its id never comes back."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._emptied: dict[str, asyncio.Event] = {}  # of closed tenants

    def __getitem__(self, tenant_id: str) -> int:
        return self._counts[tenant_id]

    def is_open(self, tenant_id: str) -> bool:
        return tenant_id not in self._emptied

    def enter(self, tenant_id: str) -> None:
        """Raises NotFoundError if the tenant is closed."""
        if not self.is_open(tenant_id):
            raise no_such_tenant()
        self._counts[tenant_id] += 1

    def leave(self, tenant_id: str) -> None:
        self._counts[tenant_id] -= 1
        if self._counts[tenant_id] == 0:
            del self._counts[tenant_id]
            if tenant_id in self._emptied:
                self._emptied[tenant_id].set()

    async def drain(self, tenant_id: str) -> None:
        """Close the tenant and wait until its last request has ended."""
        emptied = self._emptied.setdefault(tenant_id, asyncio.Event())
        if self._counts[tenant_id] == 0:
            emptied.set()
        await emptied.wait()
