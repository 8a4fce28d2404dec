"""Who is calling, in which tenant, with which scopes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.platform.errors import PermissionDeniedError


class Scope(StrEnum):
    INFER = "infer"
    ADAPTERS_READ = "adapters:read"
    ADAPTERS_WRITE = "adapters:write"
    TENANT_ADMIN = "tenant:admin"
    METRICS_READ = "metrics:read"
    PLATFORM_ADMIN = "platform:admin"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantContext:
    """The one tenant that a request runs in. `cache_salt` goes to the engine, never to a reply or a log."""

    id: str
    name: str
    cache_salt: bytes

    def __repr__(self) -> str:
        return f"TenantContext({self.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated key. `tenant` is None for platform keys."""

    key_id: str
    tenant: TenantContext | None
    scopes: frozenset[Scope]

    @property
    def is_platform_admin(self) -> bool:
        return self.tenant is None and Scope.PLATFORM_ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Raise PermissionDeniedError unless the key has `scope` (a platform admin has every scope)."""
        if scope not in self.scopes and not self.is_platform_admin:
            raise PermissionDeniedError(f"this key lacks the scope {scope}; ask your administrator for one that has it")
