"""What a client is told when its answer fails: the one error shape, and who was answering."""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse

from loraplex.adapters.errors import LoraplexError, ServerError
from loraplex.platform.errors import error_body, error_response
from loraplex.platform.openai.responses import Body, Envelope, lora_body

logger = logging.getLogger(__name__)


def failure_body(error: Exception, envelope: Envelope) -> Body:
    """Says nothing about an error that nobody foresaw; the log has it."""
    if isinstance(error, ServerError) or not isinstance(error, LoraplexError):
        logger.error("%s failed: %s", envelope.id, error, exc_info=None if isinstance(error, LoraplexError) else error)
    if not isinstance(error, LoraplexError):
        error = ServerError(f"internal error; the server's log has it under {envelope.id}")
    return {**error_body(error), "id": envelope.id, "model": envelope.model, "lora": lora_body(envelope.adapters)}


def failure_response(error: LoraplexError, envelope: Envelope) -> JSONResponse:
    """For an answer that failed before anything of it was sent."""
    plain = error_response(error, request_id=envelope.id)
    plain.body = plain.render(failure_body(error, envelope))
    plain.headers["content-length"] = str(len(plain.body))
    return plain
