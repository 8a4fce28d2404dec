"""Which fields a body may hold. A field that we do not serve is ignored only where it cannot change the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.adapters.naming import shown

_MISSPELT_LORA = frozenset({"loras", "lora_name", "lora_path", "adapter", "adapter_id", "lora_request"})

# Bookkeeping, scheduling hints and client ids of OpenAI and vLLM: whatever they hold, the answer is the same.
IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Not served: accepted only with one of these values (or null), which ask for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "early_stopping": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": (),
    "web_search_options": (),
}


def check_fields(body: Mapping[str, object], *, known: Iterable[str]) -> None:
    """Raise InvalidRequestError for the first field that would be lost silently."""
    served = frozenset(known)
    for name, value in body.items():
        if name in served:
            continue
        if _means_lora(name):
            raise InvalidRequestError(
                f"unknown field {shown(name)}; use `lora` to name the adapter", param=shown(name)[1:-1]
            )
        if name not in IGNORED and not _is_neutral(name, value):
            raise InvalidRequestError(_refusal(name), param=shown(name)[1:-1])


def _means_lora(name: str) -> bool:
    lowered = name.lower()
    return name in _MISSPELT_LORA or "lora" in lowered or "adapter" in lowered


def _is_neutral(name: str, value: object) -> bool:
    return name in NEUTRAL and (value is None or any(_equal(value, allowed) for allowed in NEUTRAL[name]))


def _equal(value: object, allowed: object) -> bool:
    return type(value) is type(allowed) and value == allowed


def _refusal(name: str) -> str:
    if name in NEUTRAL:
        return f"{name} is not served by this server; leave it out"
    return f"unknown field {shown(name)}; it is refused because ignoring it could change the answer"
