"""Leaves of the error tree (see `adapters.errors`) that the engine raises or reports.

ClientError: ContextLengthError, ConfigurationError.
ServerError: EngineDeadError, NoFreeSlotsError, NonFiniteLogitsError.
"""

from __future__ import annotations

from loraplex.adapters.errors import ClientError, ServerError


class ConfigurationError(ClientError):
    """A setting, or the model folder, cannot work; the message names the setting and a value that will."""

    code = "configuration_error"


class ContextLengthError(ClientError):
    """Prompt and requested output are longer than `max_model_len`."""

    code = "context_length_exceeded"


class EngineDeadError(ServerError):
    """The engine process ended; the request cannot be finished."""

    code = "engine_dead"


class NoFreeSlotsError(ServerError):
    """An adapter cannot be loaded now: every slot that it could take is leased, pinned or reserved."""

    code = "no_free_slots"


class NonFiniteLogitsError(ServerError):
    """The model produced NaN or Inf for this request."""

    code = "non_finite_logits"
