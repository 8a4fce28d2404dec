"""What Prometheus reads: our own `loraplex_*`, and the four names that the field's routers know.

Gauges of the engine are read from its latest stats when they are scraped, so nothing polls. Label values come from
closed sets (finish reasons, error codes, the two slot spaces), never from what clients send; adapter names appear in
one label of `vllm:lora_requests_info` alone, at most MAX_NAMES of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from loraplex.engine.frontend.protocol import EngineClient, EngineState
from loraplex.engine.messages import EngineStats
from loraplex.engine.outputs import FinishReason

MAX_NAMES = 50
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)


class RunningNames(Protocol):
    """Names of the adapters of the requests that are being served and of those that wait for their first token."""

    def running_adapters(self) -> set[str]: ...

    def waiting_adapters(self) -> set[str]: ...


class Metrics:
    """Counters and histograms of the server process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that ended, by how.", "finish_reason")
        self.cancelled = self._counter("requests_cancelled", "Requests whose client went away or that were cancelled.")
        self.errors = self._counter(
            "errors", "Error replies by status, and error events of streams by code.", "kind", "code"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self.cached_tokens = self._counter("cached_tokens", "Prompt tokens found in the prefix cache.")
        self.output_tokens = self._counter("output_tokens", "Tokens sent to clients.")
        self.time_to_first_token = Histogram(
            "loraplex_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            registry=self.registry,
            buckets=_TTFT_BUCKETS_S,
        )
        self.inter_token_latency = Histogram(
            "loraplex_inter_token_latency_seconds",
            "Between two tokens of one choice.",
            registry=self.registry,
            buckets=_ITL_BUCKETS_S,
        )
        for reason in FinishReason:
            self.requests.labels(reason.value)

    def watch(self, engine: EngineClient, names: RunningNames) -> None:
        """Show the engine's gauges too."""
        self.registry.register(_EngineCollector(engine, names))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"loraplex_{name}", help_text, labels, registry=self.registry)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineClient, names: RunningNames) -> None:
        self._engine = engine
        self._names = names

    def describe(self) -> Iterable[Metric]:
        return ()  # spares the registry a collect at registration, when the engine has no stats yet

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        yield _gauge(
            "loraplex_engine_ready", "1 when the engine takes requests.", float(self._engine.state is EngineState.READY)
        )
        yield from _request_gauges(stats)
        yield from _memory_gauges(stats)
        yield from _totals(stats)
        yield self._lora_requests_info(stats)

    def _lora_requests_info(self, stats: EngineStats) -> Metric:
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting requests; the value is the time of the reading.",
            labels=("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        running, waiting = self._names.running_adapters(), self._names.waiting_adapters()
        info.add_metric((str(stats.num_slots), _joined(running), _joined(waiting - running)), time.time())
        return info


def _request_gauges(stats: EngineStats) -> Iterator[Metric]:
    waiting = stats.num_waiting + stats.num_waiting_for_adapter
    yield _gauge("loraplex_requests_running", "Requests in the running batch.", stats.num_running)
    yield _gauge("loraplex_requests_waiting", "Requests that wait for blocks or their turn.", stats.num_waiting)
    yield _gauge(
        "loraplex_requests_waiting_for_adapter",
        "Requests whose adapter is being loaded.",
        stats.num_waiting_for_adapter,
    )
    yield _gauge("vllm:num_requests_running", "Requests in the running batch.", stats.num_running)
    yield _gauge("vllm:num_requests_waiting", "Requests that wait for any reason.", waiting)


def _memory_gauges(stats: EngineStats) -> Iterator[Metric]:
    usage = stats.num_blocks_used / stats.num_blocks if stats.num_blocks else 0.0
    yield _gauge("loraplex_kv_blocks", "KV blocks there are.", stats.num_blocks)
    yield _gauge("loraplex_kv_blocks_used", "KV blocks held by requests.", stats.num_blocks_used)
    yield _gauge("loraplex_kv_blocks_cached", "Free KV blocks that still are a prefix.", stats.num_blocks_cached)
    yield _gauge("loraplex_kv_cache_usage_ratio", "Share of the KV blocks held by requests, 0 to 1.", usage)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV blocks held by requests, 0 to 1.", usage)
    used = GaugeMetricFamily("loraplex_adapter_slots_used", "Slots that hold adapter weights.", labels=("space",))
    used.add_metric(("attention",), stats.num_attention_slots_used)
    used.add_metric(("mlp",), stats.num_mlp_slots_used)
    yield used
    total = GaugeMetricFamily("loraplex_adapter_slots", "Slots there are.", labels=("space",))
    for space in ("attention", "mlp"):
        total.add_metric((space,), stats.num_slots)
    yield total
    yield _gauge("loraplex_adapters_resident", "Adapter versions in slots.", len(stats.resident))


def _totals(stats: EngineStats) -> Iterator[Metric]:
    """Totals since the engine process started; a restart of it looks like any counter reset."""
    yield CounterMetricFamily("loraplex_engine_steps", "Steps of the engine.", stats.total_steps)
    yield CounterMetricFamily(
        "loraplex_engine_steps_replayed", "Steps of the engine from a recorded graph.", stats.total_replayed_steps
    )
    fallbacks = CounterMetricFamily(
        "loraplex_kernel_fallbacks", "Kernel calls that took the slower reference's way.", labels=("function",)
    )
    for function, count in stats.total_fallbacks.items():
        fallbacks.add_metric((function,), count)
    yield fallbacks
    yield CounterMetricFamily("loraplex_preemptions", "Requests that gave up their blocks.", stats.total_preemptions)
    yield CounterMetricFamily("loraplex_adapter_loads", "Adapters loaded into slots.", stats.total_adapter_loads)
    yield CounterMetricFamily(
        "loraplex_adapter_evictions", "Adapters that left their slots.", stats.total_adapter_evictions
    )


def _gauge(name: str, help_text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, help_text, value)


def _joined(names: set[str]) -> str:
    return ",".join(sorted(names)[:MAX_NAMES])
