"""What is measured: how many requests, through how many adapters, all at once or over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.request_set import OUTPUT_TOKENS, BenchRequest, request_set, single_stream_set


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """`num_streams` clients ask one request after the other; None: all requests are given at once."""

    name: str
    title: str
    num_requests: int
    num_adapters: int = 0
    num_streams: int | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.num_requests * OUTPUT_TOKENS

    def requests(self) -> list[BenchRequest]:
        return single_stream_set(self.num_requests) if self.num_streams == 1 else request_set(self.num_requests)


BASE_S16 = Workload(name="base_s16", title="base, 16 requests at once", num_requests=16)
BASE_S64 = Workload(name="base_s64", title="base, 64 requests at once", num_requests=64)
LORA8_S16 = Workload(name="lora8_s16", title="8 adapters, 16 requests at once", num_requests=16, num_adapters=8)
LORA64_S64 = Workload(name="lora64_s64", title="64 adapters, 64 requests at once", num_requests=64, num_adapters=64)
SERVED_S64 = Workload(name="served_s64", title="base, 64 requests, 32 HTTP streams", num_requests=64, num_streams=32)
ITL1 = Workload(name="itl1", title="base, one HTTP stream", num_requests=8, num_streams=1)

WORKLOADS = {each.name: each for each in (BASE_S16, BASE_S64, LORA8_S16, LORA64_S64, SERVED_S64, ITL1)}

# Workloads of one group are measured in one process of a contestant, groups in this order. In the first, contestants
# come in reverse, so that our own figures that are compared with each other are taken one after the other.
GROUPS = ((LORA8_S16,), (LORA64_S64,), (BASE_S16, BASE_S64), (SERVED_S64, ITL1))
