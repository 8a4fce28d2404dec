"""docs/api.md names every metric, every error code and every served field."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from loraplex.adapters.errors import AdapterRefusedError, ClientError, LoraplexError, ServerError
from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.protocol import EngineState
from loraplex.engine.messages import EngineStats
from loraplex.platform.errors import HTTP_STATUS, UnsupportedMediaTypeError, http_status
from loraplex.platform.openai.lora_field import LoraConflictError
from loraplex.platform.openai.running import RunningRequests
from loraplex.platform.openai.schemas import ChatCompletionBody, CompletionBody
from loraplex.platform.telemetry.metrics import Metrics

DOCUMENT = (Path(__file__).parents[3] / "docs" / "api.md").read_text()

# Of the management API, or never raised themselves.
NOT_HERE = {AdapterRefusedError, ClientError, ConfigurationError, ServerError, UnsupportedMediaTypeError}


class IdleEngine:
    state = EngineState.READY
    stats = EngineStats(num_slots=4)


def metric_names() -> Iterator[str]:
    metrics = Metrics()
    metrics.watch(IdleEngine(), RunningRequests())  # type: ignore[arg-type]  # only what is measured
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE") and not line.split()[2].endswith("_created"):
            yield line.split()[2]


def test_every_metric_is_documented_and_nothing_else() -> None:
    documented = set(re.findall(r"`((?:loraplex_|vllm:)\w+)`", DOCUMENT))
    assert documented == set(metric_names())


@pytest.mark.parametrize("error", [*(error for error in HTTP_STATUS if error not in NOT_HERE), LoraConflictError])
def test_every_error_is_documented_with_its_status(error: type[LoraplexError]) -> None:
    row = next(line for line in DOCUMENT.splitlines() if line.startswith("|") and f"`{error.code}`" in line)
    assert row.startswith(f"| {http_status(error)} ")


def test_every_served_field_is_documented() -> None:
    fields = ChatCompletionBody.model_fields.keys() | CompletionBody.model_fields.keys()
    assert {name for name in fields if f"`{name}`" not in DOCUMENT} == set()
