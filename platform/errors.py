"""Errors of the platform, and the one table that gives every error of the tree its HTTP status.

NotFoundError, ConflictError, AuthenticationError, PermissionDeniedError, PayloadTooLargeError,
UnsupportedMediaTypeError, ServiceUnavailableError, StorageError
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from loraplex.adapters.errors import (
    AdapterLoadError,
    AdapterRefusedError,
    ClientError,
    InvalidRequestError,
    LoraplexError,
    NeverFitsError,
    ServerError,
)
from loraplex.engine.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineDeadError,
    NoFreeSlotsError,
    NonFiniteLogitsError,
)

logger = logging.getLogger(__name__)


class NotFoundError(ClientError):
    """The thing does not exist, or is another tenant's: both look the same."""

    code = "not_found"


class ConflictError(ClientError):
    """The state of the thing does not allow this now; the message names what stands in the way."""

    code = "conflict"


class AuthenticationError(ClientError):
    """No key, or one that is unknown, expired or revoked."""

    code = "invalid_api_key"


class PermissionDeniedError(ClientError):
    """The key lacks the scope that the message names."""

    code = "insufficient_scope"


class PayloadTooLargeError(ClientError):
    """The body is longer than the cap that the message names."""

    code = "payload_too_large"


class UnsupportedMediaTypeError(ClientError):
    """The content type is none of those that the message names."""

    code = "unsupported_media_type"


class ServiceUnavailableError(ServerError):
    """Try again later: the engine is starting, restarting or shutting down."""

    code = "service_unavailable"


class StorageError(ServerError):
    """The artifact store or the database cannot be reached."""

    code = "storage_error"


HTTP_STATUS: dict[type[LoraplexError], int] = {
    LoraplexError: 500,
    ClientError: 400,
    InvalidRequestError: 400,
    AdapterRefusedError: 422,
    NeverFitsError: 400,
    ConfigurationError: 400,
    ContextLengthError: 400,
    NotFoundError: 404,
    ConflictError: 409,
    AuthenticationError: 401,
    PermissionDeniedError: 403,
    PayloadTooLargeError: 413,
    UnsupportedMediaTypeError: 415,
    ServerError: 500,
    AdapterLoadError: 503,
    EngineDeadError: 503,
    NoFreeSlotsError: 503,
    NonFiniteLogitsError: 500,
    ServiceUnavailableError: 503,
    StorageError: 503,
}


def http_status(error: type[LoraplexError]) -> int:
    """The status of the nearest class in the table."""
    return next(HTTP_STATUS[base] for base in error.__mro__ if base in HTTP_STATUS)


def error_body(error: LoraplexError) -> dict[str, Any]:
    """The one shape of an error, that of OpenAI's API; the reasons of a refused upload come along."""
    reasons = (
        [msgspec.to_builtins(reason) for reason in error.reasons] if isinstance(error, AdapterRefusedError) else None
    )
    return _shape(http_status(type(error)), error.message, code=error.code, param=error.param, reasons=reasons)


def error_response(error: LoraplexError, *, request_id: str | None = None) -> JSONResponse:
    status = http_status(type(error))
    headers = {} if request_id is None else {"x-request-id": request_id}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    if status == 503:
        headers["retry-after"] = "1"
    return JSONResponse(error_body(error), status_code=status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Give every error of the app the one shape: ours, the framework's, and those that nobody foresaw."""
    app.add_exception_handler(LoraplexError, _on_loraplex_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)


_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
_HTTP_CODES = {404: NotFoundError.code, 405: "method_not_allowed", 413: PayloadTooLargeError.code}
_HTTP_MESSAGES = {404: "no such route: {method} {path}", 405: "{path} does not take {method}"}


def _shape(
    status: int,
    message: str,
    *,
    code: str,
    param: str | None = None,
    reasons: list[Any] | None = None,
) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error if reasons is None else {**error, "reasons": reasons}}


async def _on_loraplex_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LoraplexError)
    if isinstance(error, ServerError):
        is_foreseen = http_status(type(error)) == 503  # comes in crowds while an engine starts: no tracebacks
        logger.error(
            "%s %s: %s", request.method, request.url.path, error.message, exc_info=None if is_foreseen else error
        )
    return error_response(error, request_id=_request_id(request))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = error.errors()
    message = "; ".join(_describe(fault) for fault in faults[:5])
    param = None if faults[0]["type"] == "json_invalid" else _field(faults[0]["loc"]) or None
    return JSONResponse(_shape(400, message, code=InvalidRequestError.code, param=param), status_code=400)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if message == HTTPStatus(error.status_code).phrase and error.status_code in _HTTP_MESSAGES:
        message = _HTTP_MESSAGES[error.status_code].format(method=request.method, path=request.url.path)
    code = _HTTP_CODES.get(error.status_code, InvalidRequestError.code)
    return JSONResponse(_shape(error.status_code, message, code=code), error.status_code, headers=error.headers)


async def _on_client_disconnect(request: Request, _: Exception) -> Response:
    logger.info("%s %s: the client went away in the middle of its body", request.method, request.url.path)
    return Response(status_code=400)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    """Says nothing about the fault; the server logs it with the traceback, under the id that the client gets."""
    request_id = _request_id(request)
    logger.error("%s %s failed (%s)", request.method, request.url.path, request_id, exc_info=error)
    headers = {} if request_id is None else {"x-request-id": request_id}
    message = f"internal error; the server's log has it under {request_id}"
    return JSONResponse(_shape(500, message, code=LoraplexError.code), status_code=500, headers=headers)


def _request_id(request: Request) -> str | None:
    return getattr(request.state, "request_id", None)


def _field(location: Sequence[int | str]) -> str:
    """`("body", "messages", 0, "content")` -> `messages.0.content`, without the names of pydantic's own branches."""
    return ".".join(str(part) for part in location[1:] if "[" not in str(part))


def _describe(fault: dict[str, Any]) -> str:
    if fault["type"] == "json_invalid":
        return f"the body is not valid JSON (at character {fault['loc'][-1]})"
    if tuple(fault["loc"]) == ("body",) and fault["type"] != "value_error":
        return "the body must be a JSON object, sent with `content-type: application/json`"
    field = _field(fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{field}: {message}" if field else message
