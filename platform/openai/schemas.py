"""Bodies of the inference endpoints, with OpenAI's and vLLM's names. Types are strict: "0.5" is not a number."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, field_validator, model_validator

from loraplex.adapters.errors import InvalidRequestError
from loraplex.platform.openai.fields import check_fields
from loraplex.platform.openai.lora_field import ABSENT

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 128
MAX_MESSAGES = 4096  # and parts of a message
MAX_STOP_TOKEN_IDS = 1024

TokenIds = list[int]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None

_LORA_DOC = (
    'An adapter: "name", "name@3" or "name@alias"; {"name", "version" or "alias", "weight"}; '
    "a list of those (a weighted mix); or null (the base)."
)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # never done
    continuous_usage_stats: bool = False


class GenerationBody(BaseModel):
    """Fields that chat and text completions share."""

    model_config = ConfigDict(strict=True, extra="ignore")  # `check_fields` has refused what may not be ignored

    model: str | None = None
    lora: Any = Field(default=None, description=_LORA_DOC)

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    stop: Stop = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, body: object) -> object:
        """null means the default everywhere but in `lora`."""
        if not isinstance(body, dict):
            return body
        check_fields(body, known=cls.model_fields)
        return {name: value for name, value in body.items() if value is not None or name == "lora"}

    @property
    def lora_or_absent(self) -> object:
        """The value of `lora`; ABSENT where the body lacks the field, since null has a meaning of its own."""
        return self.lora if "lora" in self.model_fields_set else ABSENT


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, message: object) -> object:
        """An earlier reply sent back as history carries `refusal: null` and its like."""
        if not isinstance(message, dict):
            return message
        return {key: value for key, value in message.items() if key in cls.model_fields or value not in (None, [])}

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} needs content")
        return self

    @property
    def text(self) -> str:
        if self.content is None:
            return ""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ChatCompletionBody(GenerationBody):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    add_special_tokens: Literal[False] = False
    echo: Literal[False] = False


class CompletionBody(GenerationBody):
    prompt: SkipValidation[str | TokenIds | list[str] | list[TokenIds]]  # `_check_prompt` does it, and in one pass
    echo: bool = False
    logprobs: int | None = None
    add_special_tokens: bool = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, prompt: object) -> object:
        """One plain message instead of what four branches of a union have to say."""
        if not (isinstance(prompt, str) or _is_list_of_prompts(prompt) or _is_token_ids(prompt)):
            raise InvalidRequestError(
                f"prompt must be a string, a list of strings, a list of token ids or a list of such lists, none of "
                f"them an empty list and at most {MAX_PROMPTS} prompts",
                param="prompt",
            )
        return prompt

    @property
    def prompts(self) -> list[str | TokenIds]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [cast(Any, self.prompt)]
        return cast("list[str | TokenIds]", self.prompt)


def _is_list_of_prompts(value: object) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= MAX_PROMPTS
        and (all(isinstance(prompt, str) for prompt in value) or all(_is_token_ids(prompt) for prompt in value))
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(token_id) is int for token_id in value)
