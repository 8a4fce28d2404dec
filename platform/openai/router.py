"""`/v1/*`, and the same under `/tenants/{tenant}/v1/*` for keys that may act for several tenants."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from loraplex.adapters.errors import LoraplexError
from loraplex.platform.api_keys.principal import Scope
from loraplex.platform.deps import CurrentPrincipal, RequestId, RequestTenant, ServicesDep, require_scope
from loraplex.platform.http.json_body import JsonRoute
from loraplex.platform.openai.answer import Answer, Caller
from loraplex.platform.openai.failure import failure_response
from loraplex.platform.openai.models import ModelCatalog
from loraplex.platform.openai.replies import Dialect, event_stream, whole_reply
from loraplex.platform.openai.schemas import ChatCompletionBody, CompletionBody, GenerationBody
from loraplex.platform.openai.service import InferenceService
from loraplex.platform.openai.stream import ClientGoneError, EventStreamResponse, until_disconnect
from loraplex.platform.services import Services

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is for the access log
MAX_MODELS = 1000

router = APIRouter(route_class=JsonRoute, tags=["inference"], dependencies=[require_scope(Scope.INFER)])


async def _caller(principal: CurrentPrincipal, tenant: RequestTenant, request_id: RequestId) -> Caller:
    return Caller(tenant=tenant, key_id=principal.key_id, request_id=request_id)


CallerDep = Annotated[Caller, Depends(_caller)]


@router.post("/chat/completions")
async def create_chat_completion(
    request: Request, body: ChatCompletionBody, caller: CallerDep, services: ServicesDep
) -> Response:
    """Answer a conversation. `lora` names the adapter; `stream` sends server-sent events."""
    answer, dialect = await InferenceService(services).chat(body, caller)
    return await _reply(request, services, body, answer, dialect)


@router.post("/completions")
async def create_completion(
    request: Request, body: CompletionBody, caller: CallerDep, services: ServicesDep
) -> Response:
    """Continue one or several prompts, given as text or token ids."""
    answer, dialect = await InferenceService(services).complete(body, caller)
    return await _reply(request, services, body, answer, dialect)


@router.get("/models")
async def list_models(
    tenant: RequestTenant,
    services: ServicesDep,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=MAX_MODELS)] = MAX_MODELS,
) -> dict[str, Any]:
    """The base, then the tenant's own adapters by name; `after` and `limit` page through them."""
    return await ModelCatalog(services).list(tenant, after=after, limit=limit)


@router.get("/models/{model:path}")
async def get_model(model: str, tenant: RequestTenant, services: ServicesDep) -> dict[str, Any]:
    """What a request with this `model` would be answered by."""
    return await ModelCatalog(services).get(tenant, model)


@router.delete("/requests/{request_id}", status_code=204)
async def cancel_request(request_id: str, tenant: RequestTenant, services: ServicesDep) -> None:
    """End a running request of the own tenant; its client gets `finish_reason: "abort"`."""
    services.running.cancel(request_id, tenant_id=tenant.id)


async def _reply(
    request: Request, services: Services, body: GenerationBody, answer: Answer, dialect: Dialect
) -> Response:
    if body.stream:
        events = event_stream(answer, dialect, body.stream_options)
        return EventStreamResponse(events, envelope=answer.envelope, metrics=services.metrics)
    try:
        reply = await until_disconnect(request.receive, whole_reply(answer, dialect))
    except ClientGoneError:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    except LoraplexError as error:
        return failure_response(error, answer.envelope)
    return Response(msgspec.json.encode(reply), media_type="application/json")
