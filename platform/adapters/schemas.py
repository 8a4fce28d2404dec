"""Adapters, versions and aliases as the API shows and takes them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from loraplex.platform.adapters.catalog import CatalogAdapter
from loraplex.platform.db.models import AdapterAlias, AdapterVersion

MAX_VERSION = 999_999_999
_FULL_WEIGHT = 100


class AdapterView(BaseModel):
    name: str
    created_at: datetime
    latest_version: int
    versions: list[int] = Field(description="Ready versions, oldest first.")
    aliases: dict[str, int] = Field(description="Alias -> version. The bare name means `default`.")

    @classmethod
    def of(cls, adapter: CatalogAdapter) -> AdapterView:
        return cls(
            name=adapter.name,
            created_at=adapter.created_at,
            latest_version=max(adapter.versions),
            versions=sorted(adapter.versions),
            aliases=dict(adapter.aliases),
        )


class FileView(BaseModel):
    name: str
    sha256: str
    size: int


class VersionView(BaseModel):
    adapter: str
    version: int
    status: str
    digest: str
    base_digest: str
    pinned: bool
    rank: int
    num_attention_slots: int
    num_mlp_slots: int
    size_bytes: int
    files: list[FileView]
    facts: dict[str, Any] = Field(description="What the inspection found: kind, targets, dtypes, scalings, warnings.")
    created_at: datetime
    created_by: str

    @classmethod
    def of(cls, adapter: str, version: AdapterVersion) -> VersionView:
        return cls(
            adapter=adapter,
            version=version.number,
            status=version.status,
            digest=version.digest,
            base_digest=version.base_digest,
            pinned=version.pinned,
            rank=version.rank,
            num_attention_slots=version.num_attention_slots,
            num_mlp_slots=version.num_mlp_slots,
            size_bytes=version.size_bytes,
            files=[FileView(name=name, **file) for name, file in sorted(version.files.items())],
            facts=version.facts,
            created_at=version.created_at,
            created_by=version.created_by,
        )


class AliasTarget(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: int = Field(strict=True, ge=1, le=MAX_VERSION)
    weight: int = Field(
        default=_FULL_WEIGHT, strict=True, ge=_FULL_WEIGHT, le=_FULL_WEIGHT, description="Only 100 for now."
    )


class PutAlias(BaseModel):
    """`{"version": 3}`, or the same as `{"targets": [{"version": 3, "weight": 100}]}`."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(default=None, strict=True, ge=1, le=MAX_VERSION)
    targets: list[AliasTarget] | None = Field(default=None, min_length=1, max_length=1)

    @model_validator(mode="after")
    def _check_one(self) -> PutAlias:
        if (self.version is None) == (self.targets is None):
            raise ValueError("give either version or targets")
        return self

    @property
    def target(self) -> int:
        return self.version if self.version is not None else (self.targets or [])[0].version


class AliasView(BaseModel):
    alias: str
    version: int
    targets: list[AliasTarget]
    etag: str
    updated_at: datetime

    @classmethod
    def of(cls, alias: AdapterAlias) -> AliasView:
        return cls(
            alias=alias.name,
            version=alias.targets[0]["version"],
            targets=[AliasTarget(**target) for target in alias.targets],
            etag=alias.etag,
            updated_at=alias.updated_at,
        )
