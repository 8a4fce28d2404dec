"""The client that measures servers, against a server whose answers are known."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from benchmarks.request_set import BenchRequest
from benchmarks.runners.stream_client import run_streams

REQUESTS = [BenchRequest([1, 2, 3], index, output_tokens=5) for index in range(6)]


class _Handler(BaseHTTPRequestHandler):
    """Answers in chunks that are cut in the middle of lines."""

    protocol_version = "HTTP/1.1"
    status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.status != 200:
            self.send_error(self.status)
            return
        self.send_response(self.status)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        events: list[Any] = [{"choices": [{"text": "x"}]}] * 3
        events.append({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        sent = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        for start in range(0, len(sent), 7):
            piece = sent[start : start + 7].encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def server(status: int = 200) -> Iterator[int]:
    handler = type("Handler", (_Handler,), {"status": status})
    listening = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=listening.serve_forever)
    thread.start()
    try:
        yield listening.server_port
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def test_every_request_is_asked_and_its_tokens_are_counted_as_the_server_counts_them() -> None:
    with server() as port:
        outcome = run_streams(port, REQUESTS, num_streams=2, extra=lambda _: {"model": "base"})
    assert outcome.num_tokens == 6 * 5
    assert len(outcome.first_token_s) == len(outcome.inter_token_s) == 6


def test_a_refusal_is_an_error_with_its_status() -> None:
    with server(status=503) as port, pytest.raises(RuntimeError, match="503"):
        run_streams(port, REQUESTS, num_streams=2, extra=lambda _: {})
