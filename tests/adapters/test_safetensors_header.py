from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import pytest

from loraplex.adapters import safetensors_header
from loraplex.adapters.refusals import Refusals
from loraplex.adapters.safetensors_header import TensorEntry, read_header

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
NEXT = {"dtype": "F16", "shape": [2], "data_offsets": [16, 20]}


def encode(header: Mapping[str, object] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def read(path: Path, content: bytes) -> tuple[list[TensorEntry], str]:
    path.write_bytes(content)
    refusals = Refusals()
    entries = read_header(path, refusals)
    return entries, "\n".join(reason.message for reason in refusals.reasons)


def test_a_good_file_yields_its_tensors_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": NEXT, "a": GOOD}
    entries, faults = read(tmp_path / "x", encode(header, b"\0" * 20))
    assert not faults
    assert [(entry.name, entry.dtype, entry.shape, entry.num_bytes) for entry in entries] == [
        ("a", "F32", (2, 2), 16),
        ("b", "F16", (2,), 4),
    ]
    assert entries[1].start == entries[0].start + 16


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty: shorter than the 8 bytes"),
        (b"\1\2", "is 2 bytes long: shorter than the 8 bytes"),
        (encode({"a": GOOD}, length=2**63 - 1), "too large"),
        (encode(b"", length=0), "not valid JSON"),
        (encode({"a": GOOD}, length=1_000), "longer than the file"),
        (encode(b"not json at all"), "not valid JSON"),
        (encode(b'{"a": 1, "a": 2}'), "'a' twice"),
        (encode(b"[" * 5_000), "nested too deeply"),
        (encode({"a": GOOD}, b"\0" * 10), "is truncated"),
        (encode({"a": GOOD}, b"\0" * 20), "4 bytes after the last tensor"),
        (encode({"a": GOOD, "b": GOOD | {"data_offsets": [8, 24]}}, b"\0" * 24), "'b' overlaps"),
        (encode({"a": GOOD | {"data_offsets": [4, 20]}}, b"\0" * 20), "'a' leaves a hole"),
        (encode({"a": GOOD | {"data_offsets": [16, 0]}}), "invalid data_offsets"),
        (encode({"a": GOOD | {"data_offsets": [0, 12]}}, b"\0" * 12), "12 bytes by its offsets, 16 by its shape"),
        (encode({"a": GOOD | {"data_offsets": [False, 16]}}, b"\0" * 16), "invalid data_offsets"),
        (encode({"a": GOOD | {"shape": [2**32, 2**32]}}), "overflows"),
        (encode({"a": GOOD | {"shape": [-2, -2]}}), "whole numbers"),
        (encode({"a": GOOD | {"shape": [1] * 9}}), "at most 8 whole numbers"),
        (encode({"a": GOOD | {"shape": [0, 2], "data_offsets": [0, 0]}}), "ZeRO-3"),
        (encode({"a": GOOD | {"dtype": "Q4_K"}}, b"\0" * 16), "dtype 'Q4_K'; allowed are F64, F32, F16, BF16"),
        (encode({"a": GOOD | {"dtype": "I32"}}, b"\0" * 16), "dtype 'I32'"),
        (encode({"a": GOOD | {"dtype": ["F32"]}}, b"\0" * 16), "dtype"),
        (encode({"a": GOOD | {"extra": 1}}, b"\0" * 16), "exactly dtype, shape and data_offsets"),
        (encode({"a": 1}), "exactly dtype, shape and data_offsets"),
        (encode({"a" * 2_000: GOOD}, b"\0" * 16), "name of 2000 characters"),
        (encode({"__metadata__": {"a": 1}}), "__metadata__"),
        (b"\x80\x02cos\nsystem\n" + b"\0" * 64, "not safetensors"),
    ],
)
def test_a_file_that_is_not_exactly_its_header_is_refused(tmp_path: Path, content: bytes, fault: str) -> None:
    _, faults = read(tmp_path / "adapter_model.safetensors", content)
    assert fault in faults
    assert "'adapter_model.safetensors'" in faults


def test_every_bad_tensor_is_named(tmp_path: Path) -> None:
    _, faults = read(tmp_path / "x", encode({"a": GOOD | {"dtype": "U8"}, "b": GOOD | {"shape": [0]}}))
    assert "'a'" in faults
    assert "'b'" in faults


@pytest.mark.parametrize(
    "content",
    [
        encode(b"{}", length=2**63 - 1),
        encode(b"{}", length=15 << 20),
        encode({f"t{i}": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for i in range(60_000)}),
        encode(b'{"a": [' + b"0," * (7 << 20) + b"0]}"),
        encode({f"t{i}": GOOD | {"shape": [2**40, 2**40]} for i in range(20_000)}),
    ],
    ids=["longest header", "header beyond the file", "60,000 tensors", "7 million numbers", "20,000 huge shapes"],
)
def test_a_header_bomb_allocates_little(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bomb"
    path.write_bytes(content)
    refusals = Refusals()
    tracemalloc.start()
    try:
        read_header(path, refusals)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refusals
    assert peak < 50 << 20


@pytest.mark.parametrize("num_bytes", [(16 << 20) + 1, 70 << 20])
def test_a_header_beyond_the_limit_is_not_even_read(
    tmp_path: Path, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million tensors need 70 MiB of header; the file really has them."""
    path = tmp_path / "bomb"
    with path.open("wb") as file:
        file.write(num_bytes.to_bytes(8, "little"))
        file.truncate(8 + num_bytes)
    num_read: list[int] = []

    class Recorder(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            content = super().read(size)
            num_read.append(len(content))
            return content

    monkeypatch.setattr(safetensors_header, "open_regular", lambda path: Recorder(io.FileIO(path)))
    refusals = Refusals()
    assert read_header(path, refusals) == []
    assert "too large" in refusals.reasons[0].message
    assert num_read == [8]


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(encode({"a": GOOD}, b"\0" * 16))
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    refusals = Refusals()
    assert read_header(tmp_path / "link", refusals) == []
    assert "symbolic link" in refusals.reasons[0].message
