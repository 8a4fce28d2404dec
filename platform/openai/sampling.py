"""From the fields of a body to the engine's sampling parameters, with OpenAI's defaults."""

from __future__ import annotations

from typing import Any

from loraplex.adapters.errors import InvalidRequestError
from loraplex.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from loraplex.platform.adapters.naming import shown
from loraplex.platform.openai.schemas import ChatCompletionBody, CompletionBody, GenerationBody

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions; chat goes on to the end of the context


def chat_sampling_params(body: ChatCompletionBody) -> SamplingParams:
    """Raises InvalidRequestError for a value out of its range or two fields that disagree."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise InvalidRequestError(
            "max_tokens and max_completion_tokens differ; give max_completion_tokens alone",
            param="max_completion_tokens",
        )
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if max_tokens == 0:
        raise InvalidRequestError("max_completion_tokens is 0; it must be at least 1", param="max_completion_tokens")
    return _sampling_params(body, max_tokens=max_tokens, logprobs=_chat_logprobs(body))


def completion_sampling_params(body: CompletionBody) -> SamplingParams:
    """`echo` with `logprobs` asks for the prompt's log-probabilities too. Raises InvalidRequestError."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequestError(
            "max_tokens is 0; that needs echo, else there is nothing to answer", param="max_tokens"
        )
    echoed = body.logprobs if body.echo else None
    return _sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs if echoed is None else max(echoed, body.prompt_logprobs or 0),
    )


def _sampling_params(body: GenerationBody, *, max_tokens: int | None, **logprobs: int | None) -> SamplingParams:
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": _top_k(body.top_k),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "min_tokens": body.min_tokens,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        n=body.n,
        seed=body.seed,
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        logit_bias=_logit_bias(body.logit_bias),
        **_asked({"prompt_logprobs": body.prompt_logprobs} | logprobs),
        **_asked(given),
    )


def _asked(fields: dict[str, Any]) -> dict[str, Any]:
    """null means the default."""
    return {name: value for name, value in fields.items() if value is not None}


def _top_k(top_k: int | None) -> int | None:
    return 0 if top_k == -1 else top_k  # vLLM's way to say: off


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _chat_logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequestError(
            f"top_logprobs is {body.top_logprobs}; it must lie between 0 and {MAX_LOGPROBS}", param="top_logprobs"
        )
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    return {_token_id(key): bias for key, bias in (biases or {}).items()}


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidRequestError(
            f"logit_bias has the key {shown(key)}; keys are token ids", param="logit_bias"
        ) from None
