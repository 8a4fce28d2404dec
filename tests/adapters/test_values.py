from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from loraplex.adapters import values
from loraplex.adapters.folder_reader import load_weights
from loraplex.adapters.values import check_values, count_bad_values, count_rounded_values
from tests.adapters.helpers import BASE, lora_tensors, messages, refusal, write_adapter

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def write_with(folder: Path, value: float, dtype: torch.dtype) -> Path:
    """One value of q in the first layer, among values that bfloat16 holds."""
    tensors = {name: torch.from_numpy(array).to(torch.bfloat16).to(dtype) for name, array in lora_tensors().items()}
    tensors[Q0][3, 5] = value
    write_adapter(folder)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5, -7e4])
def test_a_value_that_is_not_finite_in_float16_is_refused_naming_the_tensor(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    folder = write_with(tmp_path, value, dtype)
    [reason] = check_values(folder)
    assert reason.tensor == Q0
    assert "1 non-finite values" in reason.message
    assert messages(refusal(lambda: load_weights(folder, BASE))) == reason.message


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 6e-8, 65_000.0, -65_000.0])
def test_every_value_that_float16_holds_or_rounds_to_zero_passes(
    tmp_path: Path, dtype: torch.dtype, value: float
) -> None:
    assert check_values(write_with(tmp_path, value, dtype)) == []


def test_an_adapter_of_subnormals_only_passes(tmp_path: Path) -> None:
    tensors = {name: np.full_like(array, 1e-42) for name, array in lora_tensors().items()}
    assert check_values(write_adapter(tmp_path, tensors)) == []


@given(bits=st.integers(0, 2**64 - 1), dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=500, deadline=None)
def test_the_bit_test_agrees_with_the_casts(bits: int, dtype: str) -> None:
    raw = bits.to_bytes(8, "little")[: DTYPES[dtype].itemsize]
    value = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype])
    is_bad = not bool(torch.isfinite(value.to(torch.float32).to(torch.float16)).all())
    assert count_bad_values(raw, dtype) == is_bad


@pytest.mark.parametrize("value", [65_519.0, 65_519.998, 65_520.0, 65_519.999, 65_504.0, 65_535.9, 65_536.0])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_bit_test_agrees_with_the_casts_at_the_edge(value: float, dtype: str) -> None:
    tensor = torch.tensor([value, -value], dtype=torch.float64).to(DTYPES[dtype])
    num_bad = int((~torch.isfinite(tensor.to(torch.float32).to(torch.float16))).sum())
    assert count_bad_values(tensor.view(torch.uint8).numpy().tobytes(), dtype) == num_bad


@given(bits=st.integers(0, 2**64 - 1), dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=500, deadline=None)
@pytest.mark.parametrize("slot_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_counts_as_rounded_when_casting_it_changes_it(bits: int, dtype: str, slot_dtype: torch.dtype) -> None:
    raw = bits.to_bytes(8, "little")[: DTYPES[dtype].itemsize]
    if count_bad_values(raw, dtype):
        return
    value = torch.frombuffer(bytearray(raw), dtype=DTYPES[dtype]).to(torch.float32)
    is_rounded = not torch.equal(value.to(slot_dtype).to(torch.float32), value)
    assert count_rounded_values(raw, dtype, str(slot_dtype).removeprefix("torch.")) == is_rounded


def test_slots_that_would_round_an_adapter_refuse_it_and_say_what_to_do(tmp_path: Path) -> None:
    folder = write_with(tmp_path, 1 + 2**-9, torch.float32)
    assert load_weights(folder, BASE).modules
    [reason] = refusal(lambda: load_weights(folder, BASE, slot_dtype=torch.bfloat16))
    assert reason.tensor == Q0
    assert "1 values in F32 that adapter slots in bfloat16 would round" in reason.message
    assert "--lora-dtype float32" in reason.message


def test_narrow_slots_take_a_wide_file_whose_values_they_hold(tmp_path: Path) -> None:
    assert load_weights(write_with(tmp_path, 1 + 2**-7, torch.float32), BASE, slot_dtype=torch.bfloat16).modules


def test_values_are_read_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_adapter(tmp_path)
    sizes: list[int] = []

    class Recorder(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            sizes.append(-1 if size is None else size)
            return super().read(size)

    monkeypatch.setattr(values, "_CHUNK_BYTES", 1_024)
    monkeypatch.setattr(values, "open_regular", lambda path: Recorder(io.FileIO(path)))
    assert check_values(folder) == []
    assert len(sizes) > 28
    assert all(0 < size <= 1_024 for size in sizes)


def test_a_folder_without_readable_weights_yields_the_reasons(tmp_path: Path) -> None:
    assert "is missing" in check_values(tmp_path)[0].message
