"""From a tenant's row to what a request may know of it."""

from __future__ import annotations

import hashlib
import hmac

from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.db.models import Tenant
from loraplex.platform.errors import NotFoundError
from loraplex.platform.secret_key import SecretKey

ACTIVE = "active"
DELETING = "deleting"


def no_such_tenant() -> NotFoundError:
    """The same words for a tenant that is unknown, another's, or going."""
    return NotFoundError("no such tenant", param="tenant")


class TenantContexts:
    """Makes contexts. The engine's salt needs the secret key and the row, so that a copied database gives none away."""

    def __init__(self, secret_key: SecretKey) -> None:
        self._cache_key = secret_key.subkey("cache-salt")

    def of(self, tenant: Tenant) -> TenantContext:
        """Raises NotFoundError for a tenant that is being deleted."""
        if tenant.status != ACTIVE:
            raise no_such_tenant()
        salt = hmac.digest(self._cache_key, tenant.cache_salt, hashlib.sha256)
        return TenantContext(id=tenant.id, name=tenant.name, cache_salt=salt)
