from __future__ import annotations

import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from loraplex.adapters.archive import ArchiveLimits, unpack_zip
from loraplex.adapters.errors import Reason
from loraplex.adapters.file_names import check_file_name
from tests.adapters.helpers import inspect, messages, refusal, write_adapter

LIMITS = ArchiveLimits(max_entries=10, max_file_bytes=4 << 20, max_total_bytes=6 << 20)
CONFIG = ("adapter_config.json", b"{}")


def make_zip(
    path: Path, *entries: tuple[str | zipfile.ZipInfo, bytes], compression: int = zipfile.ZIP_DEFLATED
) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return path


def unpack(path: Path, target: Path, limits: ArchiveLimits = LIMITS) -> tuple[list[str], list[str]]:
    target.mkdir()
    warnings = unpack_zip(path, target, limits)
    return sorted(file.name for file in target.iterdir()), warnings


def unpack_refusal(path: Path, target: Path, limits: ArchiveLimits = LIMITS) -> tuple[Reason, ...]:
    target.mkdir()
    reasons = refusal(lambda: unpack_zip(path, target, limits))
    assert list(target.iterdir()) == []
    return reasons


def test_a_zipped_adapter_is_accepted_as_its_folder_is(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    archive = make_zip(tmp_path / "a.zip", *((file.name, file.read_bytes()) for file in folder.iterdir()))
    unpack(archive, tmp_path / "out")
    assert inspect(tmp_path / "out") == inspect(folder)


@pytest.mark.parametrize("prefix", ["", "my-adapter/", "outputs/tenantA/"])
def test_files_beside_the_config_are_taken_flat(tmp_path: Path, prefix: str) -> None:
    archive = make_zip(
        tmp_path / "a.zip",
        (f"{prefix}adapter_config.json", b"{}"),
        (f"{prefix}adapter_model.safetensors", b"w"),
        (f"{prefix}README.md", b"r"),
        (f"{prefix}added_tokens.json", b"{}"),
        (f"{prefix}notes.txt", b"n"),
        ("elsewhere/adapter_model.safetensors", b"x"),
    )
    files, warnings = unpack(archive, tmp_path / "out")
    assert files == ["adapter_config.json", "adapter_model.safetensors", "added_tokens.json"]
    assert (tmp_path / "out" / "adapter_model.safetensors").read_bytes() == b"w"
    assert any("notes.txt" in warning for warning in warnings)
    assert any("elsewhere" in warning for warning in warnings)
    assert not any("README" in warning for warning in warnings)


@pytest.mark.parametrize(
    "name",
    ["../x.json", "a/../../x.json", "/etc/x.json", "..\\x.json", "C:x.json", "a//b.json", "./x.json", "x\x01.json"],
)
def test_an_unsafe_path_is_refused(tmp_path: Path, name: str) -> None:
    reasons = unpack_refusal(make_zip(tmp_path / "a.zip", CONFIG, (name, b"x")), tmp_path / "out")
    assert [reason.code for reason in reasons] == ["unsafe_path"]
    assert list(tmp_path.glob("*.json")) == []


def test_a_name_hidden_behind_a_nul_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, ("good.json#evil", b"x"))
    archive.write_bytes(archive.read_bytes().replace(b"good.json#evil", b"good.json\0evil"))
    assert "unsafe path" in messages(unpack_refusal(archive, tmp_path / "out"))


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO])
def test_links_and_devices_are_refused(tmp_path: Path, kind: int) -> None:
    entry = zipfile.ZipInfo("adapter_model.safetensors")
    entry.external_attr = (kind | 0o777) << 16
    archive = make_zip(tmp_path / "a.zip", CONFIG, (entry, b"/etc/passwd"))
    assert "is a link or a device" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_too_many_files_are_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, *((f"{i}.json", b"") for i in range(20)))
    assert "too many files: 21 > 10" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_a_directory_too_large_to_read_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", *((f"{i:0200d}", b"") for i in range(5_000)))
    assert "too many files" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_a_bomb_is_refused_by_its_ratio_and_by_its_sizes(tmp_path: Path) -> None:
    zeros = (
        ("adapter_model.safetensors", b"\0" * (3 << 20)),
        ("adapter_model-00001-of-00002.safetensors", b"\0" * (5 << 20)),
    )
    reasons = unpack_refusal(make_zip(tmp_path / "a.zip", CONFIG, *zeros), tmp_path / "out")
    assert {reason.code for reason in reasons} == {"archive_ratio", "archive_too_large"}


def test_small_files_may_compress_well(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", ("adapter_config.json", b" " * 900_000))
    assert unpack(archive, tmp_path / "out")[0] == ["adapter_config.json"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_duplicate_name_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, CONFIG)
    assert "2 times" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_two_adapters_in_one_zip_are_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", ("a/adapter_config.json", b"{}"), ("b/adapter_config.json", b"{}"))
    assert "2 adapter_config.json" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_a_zip_without_a_config_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", ("adapter_model.safetensors", b"w"))
    assert "adapter_config.json is missing" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_an_exotic_compression_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, compression=zipfile.ZIP_LZMA)
    assert "only stored and deflate" in messages(unpack_refusal(archive, tmp_path / "out"))


def test_a_damaged_zip_is_refused(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, ("adapter_model.safetensors", bytes(range(256)) * 50))
    content = bytearray(archive.read_bytes())
    for cut in (content[:100], content[: len(content) // 2], b"", b"PK\5\6" + b"\0" * 18 + b"x"):
        (tmp_path / "cut.zip").write_bytes(cut)
        target = tmp_path / f"out{len(cut)}"
        assert unpack_refusal(tmp_path / "cut.zip", target)[0].code in ("archive_corrupt", "config_missing")
    content[content.index(b"adapter_model.safetensors") + 40] ^= 0xFF
    (tmp_path / "flipped.zip").write_bytes(content)
    (tmp_path / "flipped").mkdir()
    reasons = refusal(lambda: unpack_zip(tmp_path / "flipped.zip", tmp_path / "flipped", LIMITS))
    assert reasons[0].code == "archive_corrupt"


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz"])
def test_a_tar_is_refused_with_the_remedy(tmp_path: Path, mode: str) -> None:
    (tmp_path / "adapter_config.json").write_bytes(b"{}")
    with tarfile.open(tmp_path / "a.zip", mode) as archive:  # type: ignore[call-overload]  # mode is one of the above
        archive.add(tmp_path / "adapter_config.json", "adapter_config.json")
    [reason] = unpack_refusal(tmp_path / "a.zip", tmp_path / "out")
    assert "tar archive" in reason.message
    assert reason.remedy is not None
    assert "zip" in reason.remedy


@pytest.mark.parametrize("name", ["adapter_model.bin", "x.PT", "training_args.bin", "a.pkl", "a.pth", "a.ckpt"])
def test_a_pickle_is_refused_by_name_with_the_way_to_safetensors(name: str) -> None:
    reason = check_file_name(name)
    assert reason is not None
    assert reason.code == "pickle_refused"
    assert reason.remedy is not None
    assert "safe_serialization=True" in reason.remedy


@pytest.mark.parametrize("name", ["modeling.py", "lib.so", "run.sh", "a.tar", "a.tar.gz"])
def test_code_and_tars_are_refused_by_name(name: str) -> None:
    assert check_file_name(name) is not None


def test_code_beside_a_good_adapter_refuses_the_zip(tmp_path: Path) -> None:
    archive = make_zip(tmp_path / "a.zip", CONFIG, ("modeling_evil.py", b"import os"))
    assert "'modeling_evil.py' is code" in messages(unpack_refusal(archive, tmp_path / "out"))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0b", "C:a", "x" * 2_000])
def test_a_multipart_name_must_be_a_plain_name(name: str) -> None:
    reason = check_file_name(name)
    assert reason is not None
    assert reason.code == "unsafe_path"


@pytest.mark.parametrize(
    "name",
    ["adapter_config.json", "adapter_model.safetensors", "adapter_model-00001-of-00002.safetensors", "README.md"],
)
def test_the_files_of_an_adapter_have_good_names(name: str) -> None:
    assert check_file_name(name) is None
