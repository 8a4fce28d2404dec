from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from loraplex.engine import build
from loraplex.engine.config import EngineConfig
from loraplex.engine.frontend import engine_process
from loraplex.engine.frontend.collector import spare_collector


@pytest.fixture(autouse=True)
def _unfreeze() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_is_spared_is_walked_by_no_collection() -> None:
    held = [[index] for index in range(1000)]
    spare_collector()
    assert gc.get_freeze_count() > 1000
    assert all(one is not held for one in gc.get_objects())


def test_an_engine_process_spares_what_it_has_loaded_before_it_says_that_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen: list[int] = []

    class Loop:
        def __init__(self, *_: object, **__: object) -> None: ...

        def run(self) -> None: ...

    channel: Any = SimpleNamespace(send=lambda event: frozen.append(gc.get_freeze_count()), receive=None)
    launch: Any = SimpleNamespace(config=EngineConfig(model="x"), source=SimpleNamespace(create=lambda: None))
    monkeypatch.setattr(build, "build_engine_core", lambda *_: (object(), object()))
    monkeypatch.setattr(engine_process, "EngineLoop", Loop)
    assert engine_process._serve(launch, channel) == 0
    assert frozen[0] > 0
