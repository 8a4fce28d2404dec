"""The compiled library as Python sees it: its structures and functions."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import ClassVar, Final

import torch  # first: the library then shares the OpenMP runtime, and so the threads, that torch brought

from loraplex.kernels.cpu.build import NativeBuildError

SUFFIXES: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}
POOL_TYPES: Final = {torch.float32: 0, torch.bfloat16: 1}


class Linear(Structure):
    _fields_: ClassVar = [
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
    ]


class HeadShape(Structure):
    _fields_: ClassVar = [
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
    ]


class Batch(Structure):
    _fields_: ClassVar = [
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("block_table", c_void_p),
        ("table_width", c_int64),
        ("num_seqs", c_int64),
    ]


class AttentionInput(Structure):
    _fields_: ClassVar = [
        ("query", c_void_p),
        ("query_stride", c_int64),
        ("key", c_void_p),
        ("value", c_void_p),
        ("scale", c_float),
        ("window", c_int64),
    ]


class LoraBatch(Structure):
    _fields_: ClassVar = [
        ("token_order", c_void_p),
        ("chunk_selection", c_void_p),
        ("chunk_start", c_void_p),
        ("chunk_len", c_void_p),
        ("num_chunks", c_int64),
        ("num_tokens", c_int64),
    ]


class LoraTable(Structure):
    _fields_: ClassVar = [("slots", c_void_p), ("weights", c_void_p), ("width", c_int64)]


class LoraSlice(Structure):
    _fields_: ClassVar = [("a", c_void_p), ("b", c_void_p), ("scaling", c_void_p), ("out_features", c_int64)]


class LoraJob(Structure):
    _fields_: ClassVar = [
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("in_features", c_int64),
        ("y", c_void_p),
        ("y_stride", c_int64),
        ("slices", ctypes.POINTER(LoraSlice)),
        ("num_slices", c_int64),
        ("slot_rank", c_int64),
        ("shrunk", c_void_p),
    ]


class Layer(Structure):
    _fields_: ClassVar = [
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Linear),
        ("o", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("key_cache", c_void_p),
        ("value_cache", c_void_p),
        ("lora", LoraSlice * 7),
        ("window", c_int64),
        ("scale", c_float),
        ("has_rope", c_int32),
    ]


class Model(Structure):
    _fields_: ClassVar = [
        ("heads", HeadShape),
        ("hidden_size", c_int64),
        ("intermediate_size", c_int64),
        ("slot_rank", c_int64),
        ("eps", c_float),
        ("pool_type", c_int32),
    ]


class Step(Structure):
    _fields_: ClassVar = [
        ("num_tokens", c_int64),
        ("residual", c_void_p),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("gate_up", c_void_p),
        ("activated", c_void_p),
        ("shrunk", c_void_p),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("slot_mapping", c_void_p),
        ("batch", Batch),
        ("lora", LoraBatch),
        ("attention_table", LoraTable),
        ("mlp_table", LoraTable),
    ]


_ARGUMENTS: Final = {
    "packed_size": (c_int64, c_int64),
    "pack": (c_int, c_void_p, c_void_p, c_int64, c_int64),
    "linear": (c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64),
    "gather_rows": (c_int, c_void_p, c_void_p, c_int64, c_void_p),
    "rms_norm": (c_int, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_float, c_void_p, c_int64, c_int64),
    "add_rms_norm": (c_int, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int64, c_int64),
    "rotary": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64),
    "silu_and_mul": (c_int, c_void_p, c_void_p, c_int64, c_int64),
    "store_kv": (c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "row_maximum": (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "attention": (c_int, c_void_p, c_void_p, c_void_p, c_void_p),
    "lora": (c_int, c_void_p, c_void_p, c_void_p, c_int32),
    "decoder": (c_int, c_void_p, c_void_p, c_void_p, c_int64),
}


def load(path: Path) -> CDLL:
    """Load the library and tell ctypes the types of its functions; the calls release the GIL.

    Raises:
        NativeBuildError: the file is no library for this machine.
    """
    try:
        library = CDLL(str(path))
        library.loraplex_instruction_set.restype = ctypes.c_char_p
        for name, arguments in _ARGUMENTS.items():
            for suffix in SUFFIXES.values():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = arguments
                function.restype = c_int64 if name == "packed_size" else None
    except (OSError, AttributeError) as error:
        raise NativeBuildError(f"{path} cannot be loaded: {error}; remove it and start again") from error
    return library
