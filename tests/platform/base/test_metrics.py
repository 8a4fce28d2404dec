from __future__ import annotations

from typing import cast

from loraplex.engine.frontend.protocol import EngineClient, EngineState
from loraplex.engine.messages import EngineStats
from loraplex.platform.telemetry.metrics import Metrics


class EngineThatSays:
    state = EngineState.READY

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats


class Nobody:
    def running_adapters(self) -> set[str]:
        return set()

    def waiting_adapters(self) -> set[str]:
        return set()


def test_which_ways_the_steps_took_can_be_seen() -> None:
    stats = EngineStats(total_steps=9, total_replayed_steps=7, total_fallbacks={"layers": 2, "linear": 3})
    metrics = Metrics()
    metrics.watch(cast(EngineClient, EngineThatSays(stats)), Nobody())
    lines = metrics.render().decode().splitlines()
    assert "loraplex_engine_steps_replayed_total 7.0" in lines
    assert 'loraplex_kernel_fallbacks_total{function="layers"} 2.0' in lines
    assert 'loraplex_kernel_fallbacks_total{function="linear"} 3.0' in lines
