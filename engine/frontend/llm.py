"""Offline use: a model, some adapters, a batch of prompts.

llm = LLM("path/to/model", adapters={"support": "path/to/peft-folder"})
llm.generate(["Hello", "Hello"], SamplingParams(max_tokens=32), lora=["support", None])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import msgspec

from loraplex.adapters.errors import AdapterRefusedError, InvalidRequestError
from loraplex.adapters.folder import adapter_root
from loraplex.adapters.inspection import inspect_adapter
from loraplex.adapters.ref import BASE, AdapterRef, LoraSelection, SelectionPart
from loraplex.adapters.values import check_values
from loraplex.engine.build import build_engine_core
from loraplex.engine.config import EngineConfig
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.frontend.local_source import LocalAdapterSource
from loraplex.engine.frontend.offline_batch import OfflineBatch
from loraplex.engine.frontend.tokenizer import Tokenizer
from loraplex.engine.messages import GenerateRequest, IntegrityReport
from loraplex.engine.models.base_spec import build_base_spec
from loraplex.engine.outputs import FinishReason, TokenLogprobs
from loraplex.engine.sampling_params import SamplingParams

MAX_MIX_PARTS = 8
MAX_MIX_WEIGHT = 10

Lora: TypeAlias = str | Path | LoraSelection | None
Message: TypeAlias = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One choice. `logprobs` is empty unless they were asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOutput:
    """The answer to one prompt."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    num_cached_tokens: int


class LLM:
    """One engine in this process and thread. `settings` are fields of EngineConfig, such as `dtype`.

    On a CPU beside other busy processes, start Python with OMP_WAIT_POLICY=passive, as `loraplex serve` starts its
    engine: threads that spin for each other hold up those they wait for. Once torch is imported it is too late.

    A folder without a tokenizer serves prompts of token ids, and its answers have no text.

    Raises:
        ConfigurationError: settings or model cannot work; the message says what will.
        AdapterRefusedError: an adapter is not one that this base can serve; carries every reason.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        adapters: Mapping[str, str | Path] | None = None,
        skip_tokenizer_init: bool = False,
        **settings: Any,
    ) -> None:
        self.tokenizer = None if skip_tokenizer_init else Tokenizer.from_folder(model)
        self._source = LocalAdapterSource()
        self._core, self.info = build_engine_core(_engine_config(model, settings), self._source)
        self._base = build_base_spec(Path(model))
        self._adapters = {name: self._add_adapter(Path(folder)) for name, folder in (adapters or {}).items()}
        self._batch_ids = itertools.count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Lora | Sequence[Lora] = None,
    ) -> list[GenerationOutput]:
        """Answer all prompts in one batch.

        `lora` is what a prompt runs through: the name of one of the adapters, a PEFT folder, a `mix`, None for the
        base. It and `sampling_params` hold for all prompts, or are lists with one for each.

        Raises:
            LoraplexError: a prompt, a parameter or an adapter is refused; nothing is left running.
        """
        prompt_list: list[str | list[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        batch_id = next(self._batch_ids)
        requests = [
            GenerateRequest(
                request_id=f"{batch_id}.{index}",
                prompt_token_ids=self._encode(prompt),
                sampling_params=params,
                selection=self._select(selected),
            )
            for index, (prompt, params, selected) in enumerate(
                zip(
                    prompt_list,
                    _one_each(sampling_params or SamplingParams(), len(prompt_list), "sampling_params"),
                    _one_each(cast("Lora", lora), len(prompt_list), "lora"),
                    strict=True,
                )
            )
        ]
        answers = OfflineBatch(self._core, self.tokenizer).run(requests)
        return [_output(request, chunks) for request, chunks in zip(requests, answers, strict=True)]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora: Lora | Sequence[Lora] = None,
    ) -> list[GenerationOutput]:
        """Like `generate`, for a conversation or a list of them, through the model's chat template."""
        if self.tokenizer is None:
            raise InvalidRequestError("chat needs a tokenizer", param="messages")
        is_one = bool(conversations) and isinstance(conversations[0], Mapping)
        all_messages = cast("Sequence[Sequence[Message]]", [conversations] if is_one else conversations)
        prompts = [self.tokenizer.apply_chat_template(messages) for messages in all_messages]
        return self.generate(prompts, sampling_params, lora)

    def mix(self, parts: Iterable[tuple[str | Path, float]]) -> LoraSelection:
        """A weighted mix of adapters, each given by name or folder: `llm.mix([("a", 0.7), ("b", 0.3)])`."""
        weighted = [SelectionPart(self._ref(adapter), weight) for adapter, weight in parts]
        if len({part.ref.digest for part in weighted}) < len(weighted) or len(weighted) > MAX_MIX_PARTS:
            raise InvalidRequestError(f"a mix has at most {MAX_MIX_PARTS} adapters, each of them once", param="lora")
        if not all(abs(part.weight) <= MAX_MIX_WEIGHT for part in weighted):  # also catches NaN
            raise InvalidRequestError(
                f"a weight of a mix must lie between -{MAX_MIX_WEIGHT} and {MAX_MIX_WEIGHT}", param="lora"
            )
        return LoraSelection.of(weighted)

    def integrity(self) -> IntegrityReport:
        """What the engine holds; nothing between calls."""
        return self._core.integrity()

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token_id) for token_id in prompt]  # numpy's integers are none that cross a boundary
        if self.tokenizer is None:
            raise InvalidRequestError("without a tokenizer a prompt is a list of token ids", param="prompt")
        return self.tokenizer.encode(prompt)

    def _select(self, lora: Lora) -> LoraSelection:
        if lora is None:
            return BASE
        return lora if isinstance(lora, LoraSelection) else LoraSelection.single(self._ref(lora))

    def _ref(self, adapter: str | Path) -> AdapterRef:
        if ref := self._adapters.get(str(adapter)):
            return ref
        folder = Path(adapter)
        if not folder.is_dir():
            names = ", ".join(self._adapters) or "none"
            raise InvalidRequestError(
                f"{adapter} is neither the name of an adapter (there are: {names}) nor a folder", param="lora"
            )
        return self._add_adapter(folder)

    def _add_adapter(self, folder: Path) -> AdapterRef:
        folder = adapter_root(folder)
        facts = inspect_adapter(
            folder,
            self._base,
            max_lora_rank=self.info.max_lora_rank,
            slot_rank=self.info.slot_rank,
            num_slots=self.info.num_slots,
        )
        if reasons := check_values(folder):
            raise AdapterRefusedError(reasons)
        return AdapterRef(self._source.add(folder), facts.num_attention_slots, facts.num_mlp_slots)


def _engine_config(model: str | Path, settings: Mapping[str, Any]) -> EngineConfig:
    """The settings with their types checked, as they are for an engine process by crossing to it."""
    if unknown := sorted(settings.keys() - {field.name for field in fields(EngineConfig)}):
        raise ConfigurationError(f"the engine has no setting {', '.join(unknown)}", param=unknown[0])
    try:
        return msgspec.convert({"model": str(model), **settings}, EngineConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"a setting of the engine cannot work: {error}") from error


def _one_each(given: T | Sequence[T], count: int, name: str) -> Sequence[T]:
    """`given` for each of `count` prompts, or one for all of them."""
    if not isinstance(given, list | tuple):
        return [cast("T", given)] * count
    if len(given) != count:
        raise InvalidRequestError(f"{name} has {len(given)} entries for {count} prompts; give one each", param=name)
    return given


def _output(request: GenerateRequest, chunks: Sequence[GenerationChunk]) -> GenerationOutput:
    return GenerationOutput(
        prompt_token_ids=request.prompt_token_ids,
        outputs=[_completion(chunk) for chunk in chunks],
        prompt_logprobs=chunks[0].prompt_logprobs,
        num_cached_tokens=chunks[0].num_cached_tokens,
    )


def _completion(chunk: GenerationChunk) -> CompletionOutput:
    assert chunk.finish_reason is not None, "every request ends"
    return CompletionOutput(
        index=chunk.index,
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=chunk.logprobs,
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
    )
