"""What the fidelity check asks: adapters in PEFT's format with the logits that PEFT computed for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loraplex.platform.demo.model import ensure_demo_model

DEMO_BASE = "smol"  # how an index calls the demo model, which no folder of bases carries


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    base: Path
    folder: Path
    input_ids: list[int]
    logits: Tensor  # float32 [positions, vocabulary]; fewer positions than input_ids = the last ones
    is_plain: bool  # may not be refused
    peft_loads_it: bool
    peft_ignored_it: bool  # PEFT loads such a folder with a warning and answers like the base


def read_cases(fixtures: Path) -> Iterator[Case]:
    root = fixtures / "peft"
    for name, entry in json.loads((root / "index.json").read_text()).items():
        base, expected = find_base(root / "bases", entry["base"]), root / name / "expected.safetensors"
        if base is None or not expected.exists():
            continue
        tensors = load_file(expected)
        input_ids = tensors["input_ids"].reshape(-1).tolist()
        logits = tensors["logits"].float().reshape(-1, tensors["logits"].shape[-1])
        is_plain = entry.get("status", "ok") == "ok" and is_plain_lora(root / name)
        yield Case(
            name=name,
            base=base,
            folder=root / name,
            input_ids=input_ids,
            logits=logits,
            is_plain=is_plain,
            peft_loads_it=entry.get("status") != "peft-cannot-load",
            peft_ignored_it=entry.get("max_abs_diff_vs_base") == 0.0,
        )


def find_base(bases: Path, name: str) -> Path | None:
    if name == DEMO_BASE:
        return ensure_demo_model(Path(__file__).parents[2] / ".demo")
    return next((folder for folder in sorted(bases.iterdir()) if name in folder.name), None)


def is_plain_lora(folder: Path) -> bool:
    """Nothing but A and B on linear layers, and a configuration that says so."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if not (config.exists() and weights.exists()):
        return False
    settings = json.loads(config.read_text())
    special = (
        "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "alora_invocation_tokens",
        "layer_replication", "use_qalora", "use_bdlora", "kasa_config", "velora_config", "monteclora_config",
        "target_parameters", "fan_in_fan_out",
    )  # fmt: skip
    keys = load_file(weights)
    return (
        settings.get("peft_type") == "LORA"
        and settings.get("init_lora_weights") in (True, "gaussian", "orthogonal")
        and not any(settings.get(name) for name in special)
        and all("_proj.lora_" in key and key.startswith("base_model.model.model.layers.") for key in keys)
    )


def make_fixtures(root: Path) -> Path:
    """Small cases of the kinds that matter, made with peft on a tiny random base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from tests.helpers import ALL_PROJECTIONS, make_adapter, make_checkpoint

    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "qv_rank_4": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
        "rslora": {"r": 16, "use_rslora": True},
        "patterns": {"rank_pattern": {"q_proj": 16, "layers.1.mlp.down_proj": 4}, "alpha_pattern": {"q_proj": 64}},
        "rank_33": {"r": 33},
        "one_layer": {"layers_to_transform": [1], "target_modules": ALL_PROJECTIONS},
    }
    base = make_checkpoint(root / "peft" / "bases" / "tiny-llama")
    input_ids = torch.tensor([[1, *((i * 7 + 3) % 120 + 3 for i in range(69))]])
    for seed, (name, settings) in enumerate(kinds.items()):
        folder = make_adapter(root / "peft" / name, base, seed=seed, **settings)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), str(folder))
        with torch.no_grad():
            logits = model(input_ids=input_ids).logits
        save_file({"input_ids": input_ids, "logits": logits.contiguous()}, folder / "expected.safetensors")
    index = {name: {"base": "tiny", "status": "ok"} for name in kinds}
    (root / "peft" / "index.json").write_text(json.dumps(index))
    return root
