"""When a request is done, judged after each token."""

from __future__ import annotations

from loraplex.engine.request import Request, RequestStatus


def is_stop_token(request: Request, token_id: int) -> bool:
    """A stop token of the request, or the model's end unless that is ignored.

    The sampler never picks one before `min_tokens`, so there is nothing to check about that here.
    """
    params = request.sampling_params
    is_end = token_id in request.eos_token_ids and not params.ignore_eos
    return is_end or token_id in params.stop_token_ids


def status_after_token(request: Request) -> RequestStatus:
    """RUNNING, or how the request ends with its last token; a stop token wins over the length."""
    if is_stop_token(request, request.token_ids[-1]):
        return RequestStatus.FINISHED_STOPPED
    if request.num_output_tokens >= request.max_tokens:
        return RequestStatus.FINISHED_LENGTH
    return RequestStatus.RUNNING
