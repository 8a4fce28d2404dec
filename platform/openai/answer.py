"""One accepted request: how it is addressed, what runs for it, and what is left when it has ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass

from loraplex.engine.frontend.chunk import GenerationChunk
from loraplex.engine.outputs import FinishReason
from loraplex.platform.adapters.resolution import ResolvedSelection
from loraplex.platform.api_keys.principal import TenantContext
from loraplex.platform.openai.logprobs import TokenNames
from loraplex.platform.openai.responses import Envelope
from loraplex.platform.openai.run import GenerationRun, Timings
from loraplex.platform.openai.running import RunningRequests
from loraplex.platform.telemetry.metrics import Metrics
from loraplex.platform.usage.service import Usage, UsageService

MAX_LABEL = 255  # the width of the column

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, in which tenant, under which server-made id."""

    tenant: TenantContext
    key_id: str
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where it is written down that a request runs and has run."""

    running: RunningRequests
    usage: UsageService
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Everything about it is checked; nothing runs before `chunks` is iterated, and nothing after it is closed."""

    caller: Caller
    envelope: Envelope
    resolved: ResolvedSelection
    hold: AbstractAsyncContextManager[object]  # keeps the versions' files while the answer is made
    run: GenerationRun
    names: TokenNames
    ledger: Ledger

    @property
    def request_id(self) -> str:
        return self.caller.request_id

    @property
    def tenant_id(self) -> str:
        return self.caller.tenant.id

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return tuple(adapter.name for adapter in self.resolved.adapters)

    @property
    def has_started(self) -> bool:
        return self.run.has_started

    def cancel(self) -> None:
        self.run.cancel()

    async def chunks(self) -> AsyncGenerator[GenerationChunk, None]:
        """Raises the LoraplexError by which the request failed. However it ends, it is written down once."""
        timings = Timings(self.ledger.metrics)
        try:
            async with self.hold, aclosing(self.run.chunks()) as chunks:
                with self.ledger.running.track(self):
                    async for chunk in chunks:
                        timings.observe(chunk)
                        yield chunk
        finally:
            self._write_down()

    def _write_down(self) -> None:
        counts, reason, metrics = self.run.counts, self.run.finish_reason, self.ledger.metrics
        metrics.requests.labels(reason.value).inc()
        if reason is FinishReason.ABORT:
            metrics.cancelled.inc()
        metrics.prompt_tokens.inc(counts.prompt)
        metrics.cached_tokens.inc(counts.cached)
        metrics.output_tokens.inc(counts.completion)
        self.ledger.usage.record(
            Usage(
                tenant=self.caller.tenant.name,
                key_id=self.caller.key_id,
                request_id=self.request_id,
                adapter=_label(self.resolved)[:MAX_LABEL] or None,
                digest=self.resolved.selection.digest.hex() or None,
                prompt_tokens=counts.prompt,
                cached_tokens=counts.cached,
                completion_tokens=counts.completion,
                finish_reason=reason.value,
            )
        )
        logger.info(
            "%s ended: %s, tenant %s, adapter %s, %d prompt tokens (%d cached), %d output tokens",
            self.request_id,
            reason.value,
            self.caller.tenant.name,
            _label(self.resolved, with_digests=True) or "-",
            counts.prompt,
            counts.cached,
            counts.completion,
        )


def _label(resolved: ResolvedSelection, *, with_digests: bool = False) -> str:
    """`name@3`, or `0.7*json@1 + 0.3*support@2` for a mix; empty for the base. A digest is told by its beginning."""
    adapters = resolved.adapters
    names = [f"{one.label} ({one.digest[:12]})" if with_digests else one.label for one in adapters]
    if len(adapters) == 1 and adapters[0].weight == 1.0:
        return names[0]
    return " + ".join(f"{one.weight:g}*{name}" for one, name in zip(adapters, names, strict=True))
