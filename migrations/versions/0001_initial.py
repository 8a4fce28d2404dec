"""The tables of the first release"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit_events",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=True),
        sa.Column("actor", sa.String(length=64), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=200), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit_events")),
    )
    with op.batch_alter_table("audit_events") as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_events_tenant"), ["tenant"], unique=False)

    op.create_table(
        "settings",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_settings")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("cache_salt", sa.LargeBinary(length=32), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "usage_records",
        sa.Column("id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("request_id", sa.String(length=64), nullable=False),
        sa.Column("adapter", sa.String(length=255), nullable=True),
        sa.Column("digest", sa.String(length=64), nullable=True),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("finish_reason", sa.String(length=16), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage_records")),
    )
    with op.batch_alter_table("usage_records") as batch_op:
        batch_op.create_index(batch_op.f("ix_usage_records_tenant"), ["tenant"], unique=False)

    op.create_table(
        "adapters",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("last_version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("deleted_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_adapters_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
    )
    with op.batch_alter_table("adapters") as batch_op:
        batch_op.create_index("uq_adapters_tenant_id_name", ["tenant_id", "name"], unique=True)

    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant_id", sa.String(length=32), nullable=True),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("key_hmac", sa.LargeBinary(length=32), nullable=False),
        sa.Column("prefix", sa.String(length=12), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_api_keys_tenant_id_tenants"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_keys")),
        sa.UniqueConstraint("key_hmac", name=op.f("uq_api_keys_key_hmac")),
    )
    with op.batch_alter_table("api_keys") as batch_op:
        batch_op.create_index(batch_op.f("ix_api_keys_tenant_id"), ["tenant_id"], unique=False)

    op.create_table(
        "adapter_aliases",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("adapter_id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("etag", sa.String(length=32), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_aliases_adapter_id_adapters"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_aliases")),
    )
    with op.batch_alter_table("adapter_aliases") as batch_op:
        batch_op.create_index("uq_adapter_aliases_adapter_id_name", ["adapter_id", "name"], unique=True)

    op.create_table(
        "adapter_versions",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("adapter_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("base_digest", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("num_attention_slots", sa.Integer(), nullable=False),
        sa.Column("num_mlp_slots", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapters.id"], name=op.f("fk_adapter_versions_adapter_id_adapters"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter_versions")),
    )
    with op.batch_alter_table("adapter_versions") as batch_op:
        batch_op.create_index(batch_op.f("ix_adapter_versions_digest"), ["digest"], unique=False)
        batch_op.create_index("uq_adapter_versions_adapter_id_number", ["adapter_id", "number"], unique=True)


def downgrade() -> None:
    with op.batch_alter_table("adapter_versions") as batch_op:
        batch_op.drop_index("uq_adapter_versions_adapter_id_number")
        batch_op.drop_index(batch_op.f("ix_adapter_versions_digest"))

    op.drop_table("adapter_versions")
    with op.batch_alter_table("adapter_aliases") as batch_op:
        batch_op.drop_index("uq_adapter_aliases_adapter_id_name")

    op.drop_table("adapter_aliases")
    with op.batch_alter_table("api_keys") as batch_op:
        batch_op.drop_index(batch_op.f("ix_api_keys_tenant_id"))

    op.drop_table("api_keys")
    with op.batch_alter_table("adapters") as batch_op:
        batch_op.drop_index("uq_adapters_tenant_id_name")

    op.drop_table("adapters")
    with op.batch_alter_table("usage_records") as batch_op:
        batch_op.drop_index(batch_op.f("ix_usage_records_tenant"))

    op.drop_table("usage_records")
    op.drop_table("tenants")
    op.drop_table("settings")
    with op.batch_alter_table("audit_events") as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_events_tenant"))

    op.drop_table("audit_events")
