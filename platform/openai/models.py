"""What a caller can address as `model`: the base, and the tenant's own adapters. Nobody sees another tenant's."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from loraplex.platform.adapters.registry import ListedAdapter
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.openai.lora_field import parse_model
from loraplex.platform.openai.responses import lora_body
from loraplex.platform.services import Services

OWNER = "loraplex"


class ModelCatalog:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._base_name = services.settings.served_model_name

    async def list(self, tenant: TenantContext, *, after: str | None, limit: int) -> dict[str, Any]:
        """The base first, then adapters by name; `after` is the last id of the page before."""
        models = [self._base()] if after is None else []
        behind = "" if after in (None, self._base_name) else str(after)
        num_missing = limit + 1 - len(models)  # one more than is shown tells whether more follow
        adapters = await self._services.registry.list_for_tenant(tenant, after=behind, limit=num_missing)
        models += map(self._adapter, adapters)
        return {"object": "list", "data": models[:limit], "has_more": len(models) > limit}

    async def get(self, tenant: TenantContext, model: str) -> dict[str, Any]:
        """Raises NotFoundError for a name that answers nothing."""
        requested = parse_model(model, served_name=self._base_name)
        if not requested:
            return self._base()
        resolved = await self._services.registry.resolve(tenant, requested)
        return self._model(model, created=self._services.started_at) | {
            "parent": self._base_name,
            "lora": lora_body(resolved.adapters),
        }

    def _base(self) -> dict[str, Any]:
        info = self._services.engine_info
        return self._model(self._base_name, created=self._services.started_at) | {
            "parent": None,
            "lora": None,
            "max_model_len": None if info is None else info.max_model_len,
        }

    def _adapter(self, adapter: ListedAdapter) -> dict[str, Any]:
        return self._model(adapter.name, created=adapter.created_at) | {
            "parent": self._base_name,
            "lora": {"name": adapter.name, "version": adapter.version, "digest": adapter.digest, "weight": 1.0},
        }

    def _model(self, name: str, *, created: datetime) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": int(created.timestamp()), "owned_by": OWNER, "root": name}
