"""Offline use: one call, one batch, the same answers as transformers and PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from loraplex.adapters.errors import AdapterRefusedError, InvalidRequestError, NeverFitsError
from loraplex.engine.errors import ConfigurationError, ContextLengthError
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.messages import IntegrityReport
from loraplex.engine.outputs import FinishReason
from loraplex.engine.sampling_params import SamplingParams
from tests.helpers import make_adapter, make_byte_level_tokenizer, make_checkpoint

NOTHING = IntegrityReport(num_requests=0, num_blocks_in_use=0, num_leases=0, num_references=0, num_pending_loads=0)
SETTINGS: dict[str, Any] = {"kv_cache_memory_bytes": 16 << 20, "adapter_slots": 8, "num_threads": 1, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("llm")
    base = make_byte_level_tokenizer(make_checkpoint(root / "base", vocab_size=300))
    return {
        "base": base,
        "a": make_adapter(root / "a", base, seed=1),
        "b": make_adapter(root / "b", base, seed=2, r=4, use_rslora=True),
    }


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM(folders["base"], adapters={"a": folders["a"], "b": folders["b"]}, **SETTINGS)


def test_a_batch_of_base_adapters_and_a_mix_says_what_peft_says(llm: LLM, folders: dict[str, Path]) -> None:
    prompt = llm.generate("hello", SamplingParams(max_tokens=1))[0].prompt_token_ids
    answers = llm.generate(["hello"] * 4, GREEDY, lora=[None, "a", folders["b"], llm.mix([("a", 0.75), ("b", -0.5)])])
    peft = load_peft(folders)
    with peft.disable_adapter():
        expected = [greedy(peft, prompt)]
    for name in ("a", "b", "mix"):
        peft.set_adapter(name)
        expected.append(greedy(peft, prompt))
    for answer, (token_ids, logprobs) in zip(answers, expected, strict=True):
        (choice,) = answer.outputs
        assert list(choice.token_ids) == token_ids
        assert [entry.logprob for entry in choice.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert len({answer.outputs[0].token_ids for answer in answers}) == 4
    assert llm.integrity() == NOTHING


def test_one_prompt_may_be_a_text_or_token_ids(llm: LLM) -> None:
    (text,) = llm.generate("hello", GREEDY)
    (token_ids,) = llm.generate([text.prompt_token_ids], GREEDY)
    assert text.outputs == token_ids.outputs
    assert llm.tokenizer is not None
    assert text.outputs[0].text == llm.tokenizer.decode(text.outputs[0].token_ids)
    assert text.outputs[0].finish_reason is FinishReason.LENGTH


def test_choices_draw_with_their_own_seed(llm: LLM) -> None:
    params: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 1.0}
    (answer,) = llm.generate("hello", SamplingParams(n=3, seed=5, **params))
    alone = [llm.generate("hello", SamplingParams(seed=seed, **params))[0].outputs[0] for seed in (5, 6, 7)]
    assert [choice.index for choice in answer.outputs] == [0, 1, 2]
    assert [choice.token_ids for choice in answer.outputs] == [choice.token_ids for choice in alone]


def test_a_stop_string_ends_the_request_in_the_engine(llm: LLM) -> None:
    assert llm.tokenizer is not None
    (letter,) = llm.tokenizer.encode("a")
    params = SamplingParams(max_tokens=200, temperature=0.0, stop=("b", "aaa"), logprobs=0, logit_bias={letter: 100.0})
    (choice,) = llm.generate("hello", params)[0].outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("", FinishReason.STOP, "aaa")
    assert choice.token_ids == (letter,) * 3
    assert len(choice.logprobs) == 3
    assert llm.integrity() == NOTHING


def test_prompt_logprobs_come_once_per_request(llm: LLM) -> None:
    (answer,) = llm.generate("hello", SamplingParams(max_tokens=1, n=2, prompt_logprobs=1))
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    assert [entry.token_id for entry in answer.prompt_logprobs[1:] if entry] == answer.prompt_token_ids[1:]


def test_chat_uses_the_models_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY)
    assert one.outputs == llm.generate("<|user|>hello\n<|assistant|>", GREEDY)[0].outputs
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(one.prompt_token_ids) == "<|user|>hello\n<|assistant|>"
    assert len(llm.chat([messages, messages], GREEDY)) == 2


@pytest.mark.parametrize(
    ("prompts", "lora", "error", "message"),
    [
        ("hello", "nobody", InvalidRequestError, "there are: a, b"),
        (["hello", "hello"], ["a"], InvalidRequestError, "lora has 1 entries for 2 prompts"),
        ([[1], [100_000]], None, InvalidRequestError, "100000"),
        ([[1] * 257], None, ContextLengthError, "256"),
        ([[]], None, InvalidRequestError, "empty"),
    ],
)
def test_a_refused_call_says_why_and_leaves_nothing(
    llm: LLM, prompts: list[str], lora: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, GREEDY, lora=lora)
    assert llm.integrity() == NOTHING


@pytest.mark.parametrize("parts", [[("a", float("nan"))], [("a", 10.5)], [("a", 1.0), ("a", 1.0)]])
def test_a_mix_that_cannot_be_meant_is_refused(llm: LLM, parts: list[tuple[str, float]]) -> None:
    with pytest.raises(InvalidRequestError, match="mix"):
        llm.mix(parts)


def test_an_adapter_folder_is_checked_before_it_is_used(llm: LLM, folders: dict[str, Path], tmp_path: Path) -> None:
    bad = make_adapter(tmp_path / "bad", folders["base"])
    tensors = load_file(bad / "adapter_model.safetensors")
    next(iter(tensors.values()))[0, 0] = float("nan")
    save_file(tensors, bad / "adapter_model.safetensors")
    with pytest.raises(AdapterRefusedError, match="NaN"):
        llm.generate("hello", GREEDY, lora=bad)
    large = make_adapter(tmp_path / "large", folders["base"], r=128)
    with pytest.raises((AdapterRefusedError, NeverFitsError), match="128"):
        llm.generate("hello", GREEDY, lora=large)


def test_files_changed_in_place_are_another_adapter(llm: LLM, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "v", folders["base"], seed=1)
    first = llm.generate("hello", GREEDY, lora=folder)[0].outputs
    make_adapter(folder, folders["base"], seed=9)
    second = llm.generate("hello", GREEDY, lora=folder)[0].outputs
    assert first == llm.generate("hello", GREEDY, lora="a")[0].outputs
    assert first != second


def test_without_a_tokenizer_token_ids_are_served(folders: dict[str, Path]) -> None:
    llm = LLM(folders["base"], skip_tokenizer_init=True, **SETTINGS)
    (answer,) = llm.generate([[5, 6, 7]], GREEDY)
    assert (answer.outputs[0].text, len(answer.outputs[0].token_ids)) == ("", 8)
    with pytest.raises(InvalidRequestError, match="token ids"):
        llm.generate("hello")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"max_model_length": 5}, "max_model_length"),
        ({"backend": "magic"}, "backend"),
        ({"device": "cuda:9"}, "device"),
        ({"max_model_len": 100_000}, "max_model_len"),
    ],
)
def test_a_setting_that_cannot_work_is_named(folders: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LLM(folders["base"], **(SETTINGS | settings))


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        LLM(tmp_path, skip_tokenizer_init=True)


def load_peft(folders: dict[str, Path]) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(folders["base"], dtype=torch.float32)
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        peft = PeftModel.from_pretrained(base, folders["a"], adapter_name="a")
    peft.load_adapter(folders["b"], adapter_name="b")
    peft.add_weighted_adapter(["a", "b"], [0.75, -0.5], "mix", combination_type="cat")
    return peft.eval()


@torch.inference_mode()
def greedy(model: PeftModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Eight tokens and their log-probabilities."""
    token_ids, logprobs = list(prompt), []
    for _ in range(8):
        row = model(input_ids=torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
        token_ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return token_ids[len(prompt) :], logprobs
