"""Errors of the platform, and the one table that gives every error of the tree its HTTP status.

NotFoundError, ConflictError, AuthenticationError, PermissionDeniedError, PayloadTooLargeError,
UnsupportedMediaTypeError, ServiceUnavailableError, StorageError
"""

from __future__ import annotations

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
    NonFiniteLogitsError,
)


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
    NonFiniteLogitsError: 500,
    ServiceUnavailableError: 503,
    StorageError: 503,
}


def http_status(error: type[LoraplexError]) -> int:
    """The status of the nearest class in the table."""
    return next(HTTP_STATUS[base] for base in error.__mro__ if base in HTTP_STATUS)
