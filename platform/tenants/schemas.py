"""Tenants as the API shows and takes them."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from loraplex.platform.db.models import Tenant


class CreateTenant(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(description="1 to 63 of a-z, 0-9, '.', '_' and '-', beginning with a letter or digit.")


class TenantView(BaseModel):
    id: str
    name: str
    status: Literal["active", "deleting"]
    created_at: datetime

    @classmethod
    def of(cls, tenant: Tenant) -> TenantView:
        return cls.model_validate(tenant, from_attributes=True)
