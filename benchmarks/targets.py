"""What each ratio must reach. For speeds more is better, for times less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    ratio: str
    title: str
    at_least: float | None = None
    at_most: float | None = None

    @property
    def text(self) -> str:
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    def is_met(self, value: float) -> bool:
        return (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)


TARGETS = (
    Target(ratio="base_s16_over_best_peer", title="base, 16 requests, offline: speed over the best peer", at_least=1.1),
    Target(ratio="base_s64_over_best_peer", title="base, 64 requests, offline: speed over the best peer", at_least=1.2),
    Target(
        ratio="served_s64_over_best_peer", title="base, 64 requests, served: speed over the best peer", at_least=1.2
    ),
    Target(
        ratio="served_s64_over_best_served_peer",
        title="base, 64 requests, served: speed over the best peer that was served too",
        at_least=1.2,
    ),
    Target(ratio="lora8_s16_over_best_peer", title="8 adapters, 16 requests: speed over the best peer", at_least=4),
    Target(ratio="lora8_s16_over_base", title="8 adapters, 16 requests: speed over our own base", at_least=0.85),
    Target(ratio="lora8_s16_time_over_floor", title="8 adapters: added time over its floor", at_most=1.5),
    Target(ratio="lora64_s64_over_base", title="64 adapters, 64 requests: speed over our own base", at_least=0.55),
    Target(ratio="lora64_s64_time_over_floor", title="64 adapters: added time over its floor", at_most=1.5),
    Target(ratio="itl1_over_floor", title="one stream: time per token over its floor", at_most=1.5),
    Target(ratio="itl1_over_best_peer", title="one stream: time per token over the best peer's", at_most=1),
    Target(ratio="resident_adapters_over_none", title="base only, 8 adapters resident: speed over none", at_least=0.98),
    Target(ratio="cold_load_gap_over_p99", title="cold adapter loads: longest gap over steady P99", at_most=1.3),
    Target(ratio="cold_request_gap_over_p99", title="cold adapter's request: longest gap over steady P99", at_most=1.3),
    Target(ratio="slot_bytes_over_rank_bytes", title="64 adapters: slot bytes over their ranks' bytes", at_most=1.1),
    Target(ratio="start_to_first_token_s", title="server start to the first token, seconds", at_most=8),
)
