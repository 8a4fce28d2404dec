"""Records computations as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class CudaGraphRecorder:
    """All graphs share one pool of memory: they never run at the same time, and what they return lies outside of it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder`. The first run compiles kernels and makes handles, which a capture must not."""
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # thread_local: loader threads may allocate and copy meanwhile
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        return graph.replay
