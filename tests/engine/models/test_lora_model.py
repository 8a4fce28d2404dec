"""A whole model with adapters against PEFT, and one batch of everything against each alone."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from loraplex.engine.models.decoder import DecoderModel
from loraplex.engine.models.weight_names import module_path, projection_shape
from loraplex.kernels.lora.metadata import LoRAPools, Projection, SelectionSlots, WeightedSlot
from tests.engine.models.helpers import PagedRunner, load, prompt, save_checkpoint, transformers_logits
from tests.helpers import make_adapter

SLOT_RANK = 8
NUM_SLOTS = 40

ADAPTERS: dict[str, dict[str, Any]] = {
    "a": {"r": 8, "lora_alpha": 16},
    "b": {"r": 16, "lora_alpha": 4, "use_rslora": True},
    "c": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "d": {"r": 64, "lora_alpha": 24, "rank_pattern": {"layers.1.mlp.down_proj": 5}, "alpha_pattern": {"o_proj": 40}},
}


class World:
    """A base, PEFT adapters of it, and pools in which they are resident, NaN where nobody is."""

    def __init__(self, folder: Path) -> None:
        self.base_dir = save_checkpoint(folder / "base", "llama")
        self.model = load(self.base_dir)
        self.pools = _empty_pools(self.model)
        self.adapter_dirs: dict[str, Path] = {}
        self.slots: dict[str, SelectionSlots] = {}
        free = iter(range(NUM_SLOTS - 1, 0, -1))  # the last slot is in use
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            self.adapter_dirs[name] = make_adapter(folder / name, self.base_dir, seed=seed, std=0.1, **settings)
            count = -(-settings["r"] // SLOT_RANK)
            slots = [next(free) for _ in range(count)]
            _fill(self.model, self.pools, slots, self.peft(name))
            self.slots[name] = _selection([(slot, 1.0) for slot in slots])

    def peft(self, name: str) -> Any:
        base = AutoModelForCausalLM.from_pretrained(self.base_dir, dtype=torch.float32, attn_implementation="eager")
        with warnings.catch_warnings(category=FutureWarning, action="ignore"):
            return PeftModel.from_pretrained(base, str(self.adapter_dirs[name])).eval()

    def expected(self, name: str | None, ids: Tensor) -> Tensor:
        if name is None:
            return transformers_logits(self.base_dir, ids)
        return _peft_logits(self.peft(name), ids)

    def runner(self, rows: Sequence[tuple[SelectionSlots | None, Tensor]]) -> PagedRunner:
        selections = [slots for slots, _ in rows if slots is not None]
        index = iter(range(len(selections)))
        return PagedRunner(
            self.model,
            [ids for _, ids in rows],
            selections=[-1 if slots is None else next(index) for slots, _ in rows],
            slots=selections,
            pools=self.pools,
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_equals_peft(world: World, name: str) -> None:
    ids = prompt(40)
    expected = world.expected(name, ids)
    assert (expected - world.expected(None, ids)).abs().max() > 0.1, "an adapter that changes nothing shows nothing"
    actual = world.runner([(world.slots[name], ids)]).run(40)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("names", [["a", "b", None, "a", "c", None, "b", "d"], ["a", "b", None], [None, "d"]])
def test_a_mixed_batch_equals_each_row_alone(world: World, names: list[str | None]) -> None:
    """KN-01: also the batch [A, B, base], in which -1 once ran through the last slot."""
    rows = [(name, prompt(1 + 5 * index, seed=index)) for index, name in enumerate(names)]
    slots_and_ids = [(world.slots[name] if name else None, ids) for name, ids in rows]
    for (name, ids), together in zip(rows, world.runner(slots_and_ids).run(16), strict=True):
        torch.testing.assert_close(together, world.expected(name, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunk", [16, 32, 64, 70])
def test_chunks_of_a_prompt_run_through_its_adapter(world: World, chunk: int) -> None:
    """KN-06: A's prompt of 70 tokens while B and the base decode."""
    others = prompt(70, seed=3)
    runner = world.runner([(world.slots["a"], prompt(70)), (world.slots["b"], others), (None, others)])
    runner.step([0, 60, 60])
    pieces = []
    while runner.sequences[0].num_computed < 70:
        left = 70 - runner.sequences[0].num_computed
        pieces.append(runner.step([min(chunk, left), 1, 1])[0])
    torch.testing.assert_close(torch.cat(pieces), world.expected("a", prompt(70)), rtol=0, atol=1e-4)


def test_a_mix_equals_the_concatenation_of_peft(world: World) -> None:
    ids = prompt(30)
    model = world.peft("a")
    model.load_adapter(str(world.adapter_dirs["b"]), adapter_name="b")
    with warnings.catch_warnings(category=FutureWarning, action="ignore"):
        model.add_weighted_adapter(["default", "b"], [0.7, 0.4], "mix", combination_type="cat")
    model.set_adapter("mix")
    mix = _selection(
        [(slot, 0.7) for slot, _ in world.slots["a"].mlp] + [(slot, 0.4) for slot, _ in world.slots["b"].mlp]
    )
    actual = world.runner([(mix, ids)]).run(16)[0]
    torch.testing.assert_close(actual, _peft_logits(model, ids), rtol=0, atol=1e-4)


def test_base_rows_keep_their_bits_beside_adapters(world: World) -> None:
    """The same batch with and without selections: the rows of the base are equal to the last bit."""
    ids = [prompt(20, seed=seed) for seed in range(3)]
    plain = world.runner([(None, each) for each in ids]).run(8)
    mixed = world.runner([(world.slots["d"], ids[0]), (None, ids[1]), (world.slots["b"], ids[2])]).run(8)
    assert torch.equal(mixed[1], plain[1])
    assert not torch.equal(mixed[0], plain[0])


def test_a_row_in_a_crowd_equals_the_row_alone(world: World) -> None:
    """KN-07: the delta has the same bytes; the base's own products differ with the number of rows, by noise."""
    names = ["d", "a", "b", "c", "d", "a", "b", "d"]
    rows = [(world.slots[name], prompt(9 + 3 * index, seed=index)) for index, name in enumerate(names)]
    crowd = world.runner(rows).run(16, decode_from=8)
    for row, together in zip(rows, crowd, strict=True):
        alone = world.runner([row]).run(16, decode_from=8)[0]
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-5 * alone.abs().max().item())


def test_equal_runs_give_equal_bytes(world: World) -> None:
    """KN-07: the whole model, 20 times the same batch with rank 64."""
    rows = [(world.slots["d"], prompt(12)), (world.slots["a"], prompt(9, seed=1)), (None, prompt(17, seed=2))]
    first = world.runner(rows).run(16)
    for _ in range(19):
        assert all(torch.equal(a, b) for a, b in zip(world.runner(rows).run(16), first, strict=True))


def _selection(slots: Sequence[tuple[int, float]]) -> SelectionSlots:
    weighted = tuple(WeightedSlot(slot, weight) for slot, weight in slots)
    return SelectionSlots(weighted, weighted)


def _empty_pools(model: DecoderModel) -> LoRAPools:
    layers = model.config.num_layers

    def pool(width: int) -> Tensor:
        return torch.full((layers, NUM_SLOTS, SLOT_RANK, width), torch.nan)

    shapes = {projection: projection_shape(model.config, projection) for projection in Projection}
    return LoRAPools(
        lora_a={projection: pool(shape[1]) for projection, shape in shapes.items()},
        lora_b={projection: pool(shape[0]) for projection, shape in shapes.items()},
        scaling=torch.full((layers, len(Projection), NUM_SLOTS), torch.nan),
    )


def _fill(model: DecoderModel, pools: LoRAPools, slots: list[int], peft: Any) -> None:
    """Write every row of the slots: the adapter's rank rows, zeros where it has none."""
    modules = dict(peft.base_model.model.named_modules())
    for layer in range(model.config.num_layers):
        for projection in Projection:
            module = modules[module_path(layer, projection)]
            out_features, in_features = projection_shape(model.config, projection)
            lora_a = torch.zeros(len(slots) * SLOT_RANK, in_features)
            lora_b = torch.zeros(len(slots) * SLOT_RANK, out_features)
            scaling = 0.0
            if hasattr(module, "lora_A"):
                rank = module.r["default"]
                lora_a[:rank] = module.lora_A["default"].weight.detach()
                lora_b[:rank] = module.lora_B["default"].weight.detach().T
                scaling = module.scaling["default"]
            pools.lora_a[projection][layer, slots] = lora_a.view(len(slots), SLOT_RANK, -1)
            pools.lora_b[projection][layer, slots] = lora_b.view(len(slots), SLOT_RANK, -1)
            pools.scaling[layer, projection, slots] = scaling


def _peft_logits(model: Any, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(ids[None], use_cache=False).logits[0]
    return logits
