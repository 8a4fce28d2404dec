"""Can this server run a stored version at all? It may have been started with another base, or with fewer slots."""

from __future__ import annotations

from loraplex.adapters.base_spec import BaseSpec
from loraplex.engine.frontend.protocol import EngineClient, EngineState
from loraplex.engine.messages import EngineInfo
from loraplex.platform.adapters.catalog import CatalogVersion
from loraplex.platform.errors import ConflictError, ServiceUnavailableError


class ServingFit:
    def __init__(self, base: BaseSpec, engine: EngineClient) -> None:
        self._base = base
        self._engine = engine

    def check_started(self) -> None:
        """Raise ServiceUnavailableError until the engine has been ready for the first time."""
        if self._engine.state is EngineState.STARTING:
            raise ServiceUnavailableError("the engine is starting; try again in some seconds")

    @property
    def engine_info(self) -> EngineInfo:
        """Raises ServiceUnavailableError until there is one."""
        self.check_started()
        return self._engine.info

    def check(self, version: CatalogVersion) -> None:
        """Raise ConflictError, with the numbers, for a version that this server cannot serve."""
        if version.base_digest != self._base.digest:
            raise ConflictError(
                f"{version.label} was uploaded for another base ({version.base_digest[:12]}); this server serves "
                f"{self._base.name} ({self._base.digest[:12]}): upload the adapter again, trained on this base",
                param="lora",
            )
        info = self.engine_info
        if version.rank > info.max_lora_rank:
            raise ConflictError(
                f"{version.label} has rank {version.rank}; this server was started for ranks up to "
                f"{info.max_lora_rank}: ask the operator for a higher --max-lora-rank or more --adapter-slots",
                param="lora",
            )
        needed = max(version.ref.num_attention_slots, version.ref.num_mlp_slots)
        if needed > info.num_slots:
            raise ConflictError(
                f"{version.label} needs {needed} adapter slots of rank {info.slot_rank}; this server has "
                f"{info.num_slots}: ask the operator for more --adapter-slots",
                param="lora",
            )
