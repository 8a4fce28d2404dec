"""The demo model with the demo's own adapters says, token for token, what transformers + PEFT say in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from loraplex.platform.demo.model import ensure_demo_model
from loraplex.platform.demo.run import MIX_WEIGHTS, mix
from loraplex.platform.demo.training import ensure_demo_adapters

pytestmark = [
    pytest.mark.timeout(1200),  # on a fresh checkout it trains the adapters first
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),  # peft lags behind transformers
]

DEMO_DIR = Path(__file__).parents[2] / ".demo"
NUM_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "What is the largest planet?",
    "How many legs does a spider have?",
    "Who wrote Hamlet?",
    "What is the color of the sun?",
    "Name three fruits.",
    "What is the opposite of cold?",
    "Where do fish live?",
    "Explain what rain is.",
    "Write one sentence about winter.",
)
SELECTIONS = ("base", "json", "support", "mix")


@pytest.fixture(scope="module")
def demo() -> tuple[Path, dict[str, Path]]:
    model_dir = ensure_demo_model(DEMO_DIR)
    return model_dir, ensure_demo_adapters(model_dir, DEMO_DIR, lambda units: None)


@pytest.fixture(scope="module")
def prompts(demo: tuple[Path, dict[str, Path]]) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo[0])
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]


@pytest.fixture(scope="module")
def expected(demo: tuple[Path, dict[str, Path]], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Greedy tokens of transformers + PEFT, one left-padded batch a selection."""
    model_dir, adapters = demo
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapters["json"]), adapter_name="json").eval()
    model.load_adapter(str(adapters["support"]), adapter_name="support")
    model.add_weighted_adapter(["json", "support"], list(MIX_WEIGHTS[0]), "mix", combination_type="cat")
    answers = {}
    for selection in SELECTIONS:
        if selection == "base":
            with model.disable_adapter():
                answers[selection] = generate(model, prompts)
        else:
            model.set_adapter(selection)
            answers[selection] = generate(model, prompts)
    return answers


@torch.inference_mode()
def generate(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 2}
    output: list[list[int]] = model.generate(input_ids=ids, attention_mask=mask, eos_token_id=None, **settings)[
        :, width:
    ].tolist()
    return output


@pytest.fixture(scope="module")
def served(demo: tuple[Path, dict[str, Path]], prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """The same from our engine: all prompts through all selections in one batch."""
    model_dir, adapters = demo
    llm = LLM(model_dir, adapters=adapters, dtype="float32", adapter_slots=4, max_model_len=512)
    selection = llm.mix((part["name"], part["weight"]) for part in mix(*MIX_WEIGHTS[0]))
    lora = {"base": None, "json": "json", "support": "support", "mix": selection}
    outputs = llm.generate(
        [prompt for _ in SELECTIONS for prompt in prompts],
        SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True),
        [lora[selection] for selection in SELECTIONS for _ in prompts],
    )
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    return {name: tokens[i * len(prompts) :][: len(prompts)] for i, name in enumerate(SELECTIONS)}


@pytest.mark.parametrize("selection", SELECTIONS)
def test_greedy_tokens_equal_peft(
    selection: str, expected: dict[str, list[list[int]]], served: dict[str, list[list[int]]]
) -> None:
    assert served[selection] == expected[selection]


def test_every_selection_answers_differently(served: dict[str, list[list[int]]]) -> None:
    # on the demo's question the mix may read like one of its parts; over all of them it may not
    answers = [tuple(map(tuple, served[selection])) for selection in SELECTIONS]
    assert len(set(answers)) == len(SELECTIONS)
