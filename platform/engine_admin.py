"""What the engine holds, for operators and tests: everything must be zero when nobody is served."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter

from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.deps import ServicesDep, require_scope

router = APIRouter(prefix="/api/v1/engine", tags=["engine"], dependencies=[require_scope(Scope.PLATFORM_ADMIN)])


@router.get("")
async def get_engine(services: ServicesDep) -> dict[str, Any]:
    """What the engine is, and its latest gauges."""
    return {
        "state": services.state.value,
        "info": msgspec.to_builtins(services.engine_info),
        "stats": msgspec.to_builtins(services.engine.stats),
    }


@router.get("/integrity")
async def get_integrity(services: ServicesDep) -> dict[str, Any]:
    """Blocks, slots, leases and references now in use, and every fault that the checks find."""
    report = await services.engine.integrity()
    return {**msgspec.to_builtins(report), "num_running_requests": len(services.running)}
