"""Who did what to what. Written in the transaction of the deed, so that neither exists without the other."""

from __future__ import annotations

from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from loraplex.platform.db.models import AuditEvent

HOST = "host"  # the actor of commands run on the host itself, and of the server at its start


def record(
    session: AsyncSession,
    *,
    actor: str,
    action: str,
    target: str,
    tenant: str | None = None,
    detail: dict[str, Any] | None = None,
) -> None:
    """Add one event to the session.

    `actor` is a key id or HOST, `action` a verb such as `key.create`, `tenant` a tenant's name (it outlives the row).
    Never put a secret into `detail`.
    """
    session.add(AuditEvent(actor=actor, action=action, target=target[:200], tenant=tenant, detail=detail or {}))
