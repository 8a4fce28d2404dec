"""The tables. The truth about tenants, keys, adapters, versions and aliases; weights live in the store."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    TypeDecorator,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class UtcDateTime(TypeDecorator[datetime]):
    """Aware UTC datetimes on both databases (SQLite drops the zone)."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


def utc_now() -> datetime:
    return datetime.now(UTC)


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime(), dict[str, Any]: JSON(), list[str]: JSON()}  # noqa: RUF012


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)  # random, never reused
    name: Mapped[str] = mapped_column(String(63), unique=True)
    cache_salt: Mapped[bytes] = mapped_column(LargeBinary(32))  # random; never returned or logged
    status: Mapped[str] = mapped_column(String(16), default="active")  # active | deleting
    created_at: Mapped[datetime] = mapped_column(default=utc_now)


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), index=True)
    name: Mapped[str] = mapped_column(String(100))
    key_hmac: Mapped[bytes] = mapped_column(LargeBinary(32), unique=True)
    prefix: Mapped[str] = mapped_column(String(12))
    scopes: Mapped[list[str]]
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]


class Adapter(Base):
    """A name of a tenant. Stays, with `deleted_at` set, so that version numbers are never reused."""

    __tablename__ = "adapters"
    __table_args__ = (Index("uq_adapters_tenant_id_name", "tenant_id", "name", unique=True),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(63))
    last_version: Mapped[int] = mapped_column(Integer, default=0)  # the highest number ever given
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    deleted_at: Mapped[datetime | None]


class AdapterVersion(Base):
    __tablename__ = "adapter_versions"
    __table_args__ = (Index("uq_adapter_versions_adapter_id_number", "adapter_id", "number", unique=True),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(64), index=True)
    base_digest: Mapped[str] = mapped_column(String(64))
    status: Mapped[str] = mapped_column(String(16))  # ready | retired (draining, then removed)
    pinned: Mapped[bool] = mapped_column(default=False)
    num_attention_slots: Mapped[int]
    num_mlp_slots: Mapped[int]
    rank: Mapped[int]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    files: Mapped[dict[str, Any]]  # name -> {"sha256", "size"}
    facts: Mapped[dict[str, Any]]  # PEFT kind, scale, targets, tensors, warnings
    created_at: Mapped[datetime] = mapped_column(default=utc_now)
    created_by: Mapped[str] = mapped_column(String(32))  # key id


class AdapterAlias(Base):
    """`default` and named aliases. Weighted targets: [{"version": 3, "weight": 100}]."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (Index("uq_adapter_aliases_adapter_id_name", "adapter_id", "name", unique=True),)

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    adapter_id: Mapped[str] = mapped_column(ForeignKey("adapters.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(32))
    targets: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    etag: Mapped[str] = mapped_column(String(32))
    updated_at: Mapped[datetime] = mapped_column(default=utc_now)


class AuditEvent(Base):
    """Who did what to what. Outlives its tenant, hence no foreign keys."""

    __tablename__ = "audit_events"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(default=utc_now)
    tenant: Mapped[str | None] = mapped_column(String(63), index=True)
    actor: Mapped[str] = mapped_column(String(64))  # key id, or "host"
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(String(200))
    detail: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)


class UsageRecord(Base):
    """Tokens of one finished request. Outlives its tenant."""

    __tablename__ = "usage_records"

    id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    at: Mapped[datetime] = mapped_column(default=utc_now)
    tenant: Mapped[str] = mapped_column(String(63), index=True)
    key_id: Mapped[str] = mapped_column(String(32))
    request_id: Mapped[str] = mapped_column(String(64))
    adapter: Mapped[str | None] = mapped_column(String(255))  # as it answered: name@3, or a mix
    digest: Mapped[str | None] = mapped_column(String(64))
    prompt_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    finish_reason: Mapped[str] = mapped_column(String(16))


class Setting(Base):
    """Facts about this installation: fingerprint of the secret key, whether it is bootstrapped."""

    __tablename__ = "settings"

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))
