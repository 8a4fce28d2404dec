"""Many adapters in one batch of a real engine: each row says what PEFT says of it alone, whoever sits beside it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.adapters.ref import LoraSelection
from loraplex.engine.frontend.llm import LLM
from loraplex.engine.sampling_params import SamplingParams
from tests.acceptance.logits_recorder import LogitsRecorder
from tests.helpers import make_adapter, make_checkpoint

P12 = [1, 5, 9, 17, 33, 65, 3, 77, 12, 90, 41, 22]
L70 = [(i * 7 + 3) % 120 + 3 for i in range(70)]
NUM_CACHED = 64  # whole blocks of L70
RANKS = (1, 3, 7, 8, 12, 24, 33, 96)
PATTERNS = {"rank_pattern": {"layers.1.mlp.down_proj": 4, "q_proj": 16}, "alpha_pattern": {"q_proj": 64}}
KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"r": 16, "lora_alpha": 16, "use_rslora": True},
    "patterns": PATTERNS,
    "patterns and rslora": PATTERNS | {"use_rslora": True},
    "one layer": {"target_modules": r".*layers\.1\.(self_attn\.(q|v)_proj|mlp\.down_proj)$"},
}
DTYPES: dict[str, list[torch.dtype]] = {
    "float64": [torch.float64],
    "bfloat16": [torch.bfloat16],
    "float16": [torch.float16],
    "mixed": [torch.float32, torch.bfloat16, torch.float16],
}
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
ATOL = 1e-4  # of log-probabilities; what an adapter changes is a thousand times as much


class World:
    """The tiny base, its adapters by name, and an engine without a prefix cache, so that every position is computed."""

    def __init__(self, root: Path) -> None:
        self.base = make_checkpoint(root / "base")
        self.folders = {
            **{f"rank {rank}": make_adapter(root / f"r{rank}", self.base, seed=rank, r=rank) for rank in RANKS},
            **{kind: make_adapter(root / kind, self.base, **settings) for kind, settings in KINDS.items()},
            **{name: save_as(root / name, self.base, dtypes) for name, dtypes in DTYPES.items()},
            "A": make_adapter(root / "A", self.base, seed=1),
            "B": make_adapter(root / "B", self.base, seed=2, r=16),
            "rank 64": make_adapter(root / "r64", self.base, seed=64, r=64),
        }
        self.llm = self.create_llm(enable_prefix_caching=False)

    def create_llm(self, **settings: Any) -> LLM:
        given: dict[str, Any] = {"adapter_slots": 40, "kv_cache_memory_bytes": 16 << 20, "num_threads": 1}
        return LLM(
            self.base,
            adapters=self.folders,
            skip_tokenizer_init=True,
            dtype="float32",
            **(given | settings),
        )

    def mixed(self, *parts: tuple[str, float]) -> LoraSelection:
        return self.llm.mix(parts)

    @torch.inference_mode()
    def expected(self, prompt: list[int], *parts: tuple[str, float]) -> Tensor:
        """PEFT's log-probabilities [positions, vocabulary]; no part is the base, several are concatenated."""
        model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
        if parts:
            model = self._peft(model, parts)
        logprobs: Tensor = model(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        return logprobs

    def _peft(self, base: Any, parts: Sequence[tuple[str, float]]) -> Any:
        names = [f"part{index}" for index in range(len(parts))]
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            model = PeftModel.from_pretrained(base, str(self.folders[parts[0][0]]), adapter_name=names[0])
        for name, (adapter, _) in list(zip(names, parts, strict=True))[1:]:
            model.load_adapter(str(self.folders[adapter]), adapter_name=name)
        weights = [weight for _, weight in parts]
        if weights == [1.0]:
            return model.eval()  # a sum would take over its patterns and rsLoRA, and apply them twice
        model.add_weighted_adapter(names, weights, "all", combination_type="cat")
        model.set_adapter("all")
        return model.eval()


def save_as(folder: Path, base: Path, dtypes: Sequence[torch.dtype]) -> Path:
    """An adapter whose tensors have these dtypes in turn."""
    make_adapter(folder, base, seed=5)
    tensors = load_file(folder / "adapter_model.safetensors")
    cast = {name: tensor.to(dtypes[i % len(dtypes)]) for i, (name, tensor) in enumerate(tensors.items())}
    save_file(cast, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("peft"))


def run(
    llm: LLM,
    prompts: Sequence[list[int]],
    loras: Sequence[str | LoraSelection | None],
    params: SamplingParams | list[SamplingParams] = ONE_TOKEN,
) -> list[Tensor]:
    """Our log-probabilities of every position that was computed, of each prompt in one batch."""
    with LogitsRecorder(llm) as recorder:
        llm.generate(list(prompts), params, list(loras))
    return [logits.log_softmax(-1) for logits in recorder.logits()]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize("names", [[f"rank {rank}" for rank in RANKS], [*KINDS, *DTYPES]], ids=["ranks", "kinds"])
def test_one_batch_of_everything_equals_peft_row_by_row(world: World, names: list[str]) -> None:
    loras = [*names, None, *reversed(names)]
    rows = run(world.llm, [L70] * len(loras), loras)
    base = world.expected(L70)
    assert_close(rows[len(names)], base)
    for index, name in enumerate(names):
        expected = world.expected(L70, (name, 1.0))
        assert (expected - base).abs().max() > 0.1, "an adapter that changes nothing shows nothing"
        assert_close(rows[index], expected)
        assert_close(rows[-1 - index], expected)


def test_weights_of_one_adapter_in_one_batch_scale_what_it_adds(world: World) -> None:
    weights = [0.0, 0.5, 1.0, 2.0, -1.0]
    selections = [world.mixed(("A", weight)) for weight in weights]
    *rows, plain, base = run(world.llm, [L70] * 7, [*selections, "A", None])
    for weight, row in zip(weights, rows, strict=True):
        assert_close(row, world.expected(L70, ("A", weight)))
    assert torch.equal(rows[0], base)
    assert torch.equal(rows[2], plain)
    assert min((one - other).abs().max() for one in rows for other in rows if one is not other) > 0.1


def test_a_mix_of_ranks_equals_the_concatenation_of_peft(world: World) -> None:
    rows = run(world.llm, [L70, P12, L70], [world.mixed(("A", 0.7), ("B", 0.3)), "B", world.mixed(("B", 0.3))])
    assert_close(rows[0], world.expected(L70, ("A", 0.7), ("B", 0.3)))
    assert_close(rows[1], world.expected(P12, ("B", 1.0)))
    assert_close(rows[2], world.expected(L70, ("B", 0.3)))


def test_a_cached_prefix_is_that_of_its_own_selection(world: World) -> None:
    """Base, A, B, A, base, B: nothing is cached at first use, everything at the second, and no answer changes."""
    llm = world.create_llm()
    asked: list[list[tuple[str, float]]] = [[], [("A", 1.0)], [("B", 1.0)], [("A", 1.0)], [], [("B", 1.0)]]
    num_cached = []
    for parts in [*asked, [("A", 0.5)], [("A", 0.5)]]:
        with LogitsRecorder(llm) as recorder:
            (answer,) = llm.generate([L70], ONE_TOKEN, world.mixed(*parts))
        num_cached.append(answer.num_cached_tokens)
        (computed,) = recorder.logits()
        assert_close(computed.log_softmax(-1), world.expected(L70, *parts)[answer.num_cached_tokens :])
    assert num_cached == [0, 0, 0, NUM_CACHED, NUM_CACHED, NUM_CACHED, 0, NUM_CACHED]


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 2048])
def test_a_prompt_in_chunks_beside_decodes_equals_the_whole_prompt(world: World, chunk_size: int) -> None:
    llm = world.create_llm(max_num_batched_tokens=chunk_size, max_num_seqs=4)
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (24, 24, 1)]
    rows = run(llm, [P12[:3], P12[:3], L70], ["B", None, "A"], params)
    assert_close(rows[2], world.expected(L70, ("A", 1.0)))
    assert_close(rows[0][:3], world.expected(P12[:3], ("B", 1.0)))
    assert_close(rows[1][:3], world.expected(P12[:3]))
    assert [len(row) for row in rows] == [3 + 23, 3 + 23, 70]


def test_twenty_equal_runs_give_equal_bytes(world: World) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    first = run(world.llm, [P12], ["rank 64"], params)[0]
    assert len(first) == len(P12) + 23
    assert all(torch.equal(run(world.llm, [P12], ["rank 64"], params)[0], first) for _ in range(19))
