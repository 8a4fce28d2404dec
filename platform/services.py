"""Everything that lives as long as the server process, made once by `platform.app` and handed to the routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from loraplex.adapters.base_spec import BaseSpec
    from loraplex.engine.frontend.generator import Generator
    from loraplex.engine.frontend.protocol import EngineClient
    from loraplex.engine.frontend.tokenizer import Tokenizer
    from loraplex.platform.adapters.registry import AdapterRegistry
    from loraplex.platform.api_keys.service import ApiKeyService
    from loraplex.platform.db.session import Database
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
