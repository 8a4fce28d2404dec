"""Everything that lives as long as the server process, made once by `platform.startup` and handed to the routes."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from loraplex.engine.frontend.protocol import EngineState
from loraplex.platform.errors import ServiceUnavailableError
from loraplex.platform.in_progress import RequestsInProgress

if TYPE_CHECKING:
    from loraplex.adapters.base_spec import BaseSpec
    from loraplex.engine.frontend.generator import Generator
    from loraplex.engine.frontend.protocol import EngineClient
    from loraplex.engine.frontend.tokenizer import Tokenizer
    from loraplex.engine.messages import EngineInfo
    from loraplex.platform.adapters.registry import AdapterRegistry
    from loraplex.platform.api_keys.service import ApiKeyService
    from loraplex.platform.db.session import Database
    from loraplex.platform.openai.running import RunningRequests
    from loraplex.platform.secret_key import SecretKey
    from loraplex.platform.settings import Settings
    from loraplex.platform.storage.artifact_store import ArtifactStore
    from loraplex.platform.telemetry.metrics import Metrics
    from loraplex.platform.tenants.service import TenantService
    from loraplex.platform.usage.service import UsageService


@dataclass(slots=True, kw_only=True)
class Services:
    """Kept in `app.state.services`."""

    settings: Settings
    secret_key: SecretKey
    database: Database
    store: ArtifactStore
    base: BaseSpec
    engine: EngineClient
    tokenizer: Tokenizer | None
    generator: Generator
    api_keys: ApiKeyService
    tenants: TenantService
    registry: AdapterRegistry
    usage: UsageService
    metrics: Metrics
    running: RunningRequests
    tokenizing: Executor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="tokenizing"))
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    in_progress: RequestsInProgress = field(default_factory=RequestsInProgress)
    is_draining: bool = False  # set once, at SIGTERM

    @property
    def state(self) -> EngineState:
        """As `/readyz` tells it."""
        return EngineState.DRAINING if self.is_draining else self.engine.state

    @property
    def engine_info(self) -> EngineInfo | None:
        """What the engine told about itself when it last became ready; None before the first time."""
        return None if self.engine.state is EngineState.STARTING else self.engine.info

    def check_ready(self) -> EngineInfo:
        """Raise ServiceUnavailableError unless requests are taken now."""
        if self.state is not EngineState.READY:
            raise ServiceUnavailableError(f"the server is {self.state.value}; try again in some seconds")
        return self.engine.info
