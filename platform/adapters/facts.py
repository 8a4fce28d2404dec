"""What the registry remembers of a version's inspection, and what follows from it on a server with other slots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from loraplex.adapters.base_spec import BaseSpec
from loraplex.adapters.inspection import AdapterFacts
from loraplex.adapters.ref import AdapterRef
from loraplex.platform.db.models import AdapterVersion


def stored_facts(facts: AdapterFacts, base: BaseSpec, *, also_warn: Sequence[str] = ()) -> dict[str, Any]:
    """JSON for `AdapterVersion.facts`. The highest rank of each slot space outlives a change of `slot_rank`."""
    projections = {module.path: module.projection for module in base.modules()}
    attention = [module for module in facts.modules if projections[module.path].is_attention]
    mlp = [module for module in facts.modules if not projections[module.path].is_attention]
    return {
        "peft_type": facts.peft_type,
        "use_rslora": facts.use_rslora,
        "target_modules": list(facts.target_modules),
        "num_tensors": facts.num_tensors,
        "dtypes": list(facts.dtypes),
        "scalings": sorted({module.scaling for module in facts.modules}),
        "attention_rank": _highest(module.rank for module in attention),
        "mlp_rank": _highest(module.rank for module in mlp),
        "base_model_name": facts.base_model_name,
        "warnings": [*also_warn, *facts.warnings],
    }


def adapter_ref(version: AdapterVersion, *, slot_rank: int) -> AdapterRef:
    """The version's identity for an engine whose slots hold `slot_rank` rank rows."""
    return AdapterRef(
        digest=version.digest,
        num_attention_slots=-(-int(version.facts["attention_rank"]) // slot_rank),
        num_mlp_slots=-(-int(version.facts["mlp_rank"]) // slot_rank),
    )


def _highest(ranks: Iterable[int]) -> int:
    return max(ranks, default=0)
