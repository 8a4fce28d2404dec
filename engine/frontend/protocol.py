"""How the platform (or anybody else) sees an engine: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from enum import StrEnum
from typing import Protocol

from loraplex.adapters.ref import AdapterRef
from loraplex.engine.messages import EngineInfo, EngineStats, GenerateRequest, IntegrityReport
from loraplex.engine.outputs import RequestOutput


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    STOPPED = "stopped"


class EngineClient(Protocol):
    """The one seam between frontend and engine. All errors are leaves of LoraplexError."""

    @property
    def state(self) -> EngineState: ...

    @property
    def info(self) -> EngineInfo:
        """What the engine told about itself when it last became ready."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The latest gauges."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request until its `finish_reason`. Closing the iterator early aborts the request.

        A request refused or failed by the engine ends with `finish_reason=ERROR` and `error` set; a death of the
        engine raises EngineDeadError within 2 s.
        """
        ...

    async def abort(self, request_ids: list[str]) -> None: ...

    async def load_adapter(self, ref: AdapterRef) -> None: ...

    async def unload_adapter(self, digest: str) -> None: ...

    async def pin_adapter(self, ref: AdapterRef) -> None: ...

    async def unpin_adapter(self, digest: str) -> None: ...

    async def integrity(self) -> IntegrityReport: ...
