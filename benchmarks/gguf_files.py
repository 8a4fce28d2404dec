"""The same weights and adapters as GGUF files, for the peers that read nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.request_set import adapter_name

WideType = Literal["bf16", "f16"]

# Of the source file, and written anew or not true of the target.
_NOT_COPIED = ("general.architecture", "general.file_type", "general.quantization_version")


def ensure_model(source: Path, folder: Path, wide_type: WideType) -> None:
    """Write `model-<wide_type>.gguf`: the quantized `source` expanded, as the demo model is; norms stay float32."""
    target = folder / f"model-{wide_type}.gguf"
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    _write_wide(source, partial, wide_type)
    os.replace(partial, target)


def ensure_adapters(converter: Path, model: Path, adapters: Path, folder: Path, num_adapters: int) -> None:
    """Convert PEFT folders by llama.cpp's own script.

    Raises:
        RuntimeError: the script failed; with what it wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in map(adapter_name, range(num_adapters)):
        target, partial = folder / f"{name}.gguf", folder / f"{name}.partial"
        if target.exists():
            continue
        command = [sys.executable, str(converter), "--base", str(model), "--outtype", "bf16"]
        command += ["--outfile", str(partial), str(adapters / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{converter.name} failed on {name}:\n{done.stderr[-2000:]}")
        os.replace(partial, target)


def _write_wide(source: Path, target: Path, wide_type: WideType) -> None:
    import gguf

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(target, "llama")
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in _NOT_COPIED:
            continue
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if is_array else None)
    is_bf16 = wide_type == "bf16"
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if is_bf16 else gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        _add_tensor(writer, tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type), wide_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: Any, name: str, values: np.ndarray[Any, np.dtype[np.float32]], wide_type: WideType) -> None:
    import gguf

    if values.ndim == 1:
        writer.add_tensor(name, values.astype(np.float32))
    elif wide_type == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        bf16 = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor(name, bf16, raw_dtype=gguf.GGMLQuantizationType.BF16)
