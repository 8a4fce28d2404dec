"""Whether the process lives, and whether it takes requests: one word each, without a key."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse

from loraplex.engine.frontend.protocol import EngineState
from loraplex.platform.deps import ServicesDep
from loraplex.platform.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["operations"])


@router.get("/livez", response_class=PlainTextResponse)
async def livez() -> str:
    """200 as long as the process answers at all."""
    return "live"


@router.get("/readyz", response_class=PlainTextResponse)
async def readyz(services: ServicesDep) -> Response:
    """200 `ready`, or 503 and the reason: `starting`, `restarting`, `draining` or `stopped`."""
    state = services.state
    return PlainTextResponse(state.value, status_code=200 if state is EngineState.READY else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(services: ServicesDep) -> Response:
    """Prometheus text. Needs the scope metrics:read unless the server was started with --metrics-public."""
    return Response(services.metrics.render(), media_type=CONTENT_TYPE)
