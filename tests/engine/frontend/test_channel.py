"""What crosses the process boundary, and what must not get through."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from pathlib import Path

import msgspec
import pytest

from loraplex.engine.errors import ConfigurationError
from loraplex.engine.frontend.channel import ClientChannel, EngineChannel
from loraplex.engine.frontend.child_environment import child_environment
from loraplex.engine.frontend.engine_handle import make_socket_folder
from loraplex.engine.frontend.source_spec import SourceSpec
from loraplex.engine.messages import CallReply, EngineCall, GetIntegrity, OutputBatch
from loraplex.engine.outputs import FinishReason
from tests.engine.frontend.helpers import LOCAL_SOURCE, request


async def test_a_malformed_call_is_answered_where_possible_and_never_raises() -> None:
    folder = make_socket_folder()
    client, engine = ClientChannel(folder), EngineChannel(folder)
    bad_request = msgspec.to_builtins(request("bad")) | {"prompt_token_ids": "none"}
    bad_params = msgspec.to_builtins(request("params"))
    bad_params["sampling_params"]["temperature"] = -1.0
    bad_calls = (
        ("GenerateRequest", bad_request),
        ("GenerateRequest", bad_params),
        ("LoadAdapter", {"call_id": 7}),
        ("NoSuchCall", {"call_id": 9}),
    )
    try:
        for message in (b"", b"\xc1", msgspec.msgpack.encode([1, 2])):
            client._calls.send(message)
        for bad_call in bad_calls:
            client._calls.send(msgspec.msgpack.encode(bad_call))
        client.send(GetIntegrity(call_id=8))
        received: list[EngineCall] = []
        while not received:
            received += engine.receive(1000)
        assert received == [GetIntegrity(call_id=8)]
        events = [await asyncio.wait_for(client.receive(), 10) for _ in range(4)]
    finally:
        engine.close()
        client.close()
        shutil.rmtree(folder)
    for event, request_id in zip(events, ("bad", "params"), strict=False):
        assert isinstance(event, OutputBatch)
        assert [(output.request_id, output.finish_reason) for output in event.outputs] == [
            (request_id, FinishReason.ERROR)
        ]
    for event, call_id in zip(events[2:], (7, 9), strict=True):
        assert isinstance(event, CallReply)
        assert event.call_id == call_id
        assert event.error is not None


def test_the_sockets_lie_in_a_fresh_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = make_socket_folder()
    assert stat.S_IMODE(usual.stat().st_mode) == 0o700
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    short = make_socket_folder()
    assert len(str(short)) < 90
    for folder in (usual, short):
        folder.rmdir()


def test_only_allowed_variables_reach_the_engine() -> None:
    given = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "0",
        "LORAPLEX_ADMIN_KEY": "secret",
        "AWS_SESSION_TOKEN": "secret",
        "PGPASSWORD": "secret",
        "HTTPS_PROXY": "http://user:secret@proxy",
    }
    seen = child_environment(given)
    assert "secret" not in json.dumps(seen)
    assert {"PATH", "LC_ALL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"} <= seen.keys()
    assert seen["OMP_WAIT_POLICY"] == "passive"
    assert child_environment({"OMP_WAIT_POLICY": "active"})["OMP_WAIT_POLICY"] == "active"


def test_a_source_is_named_and_built_anew_and_never_shown(tmp_path: Path) -> None:
    spec = SourceSpec(factory=LOCAL_SOURCE, options={"folders": []})
    assert msgspec.json.decode(msgspec.json.encode(spec), type=SourceSpec) == spec
    assert spec.create().__class__.__name__ == "LocalAdapterSource"
    assert "hush" not in repr(SourceSpec(factory="a:b", options={"secret": "hush"}))
    for factory in ("no_such_module:f", "json:no_such_function", "json", ""):
        with pytest.raises(ConfigurationError, match="adapter source"):
            SourceSpec(factory=factory).create()
