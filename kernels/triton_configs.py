"""The static table of tile sizes: by architecture, width of the elements and shape.

A row's LoRA delta must have the same bits in every batch, so whatever changes the order of its sums (number of splits,
tile sizes) depends on the weights' shape alone, and how its keys are parted on its own length. Only 4-bit products,
which stand beside cuBLAS's, are chosen by the number of rows. Nothing is tuned at run time. Every entry is
compiled ahead of time for 8.0, 8.6 and 9.0 by the tests, without spills and with at most 99 KiB of shared memory, which
is what the smallest supported GPUs (compute capability 8.6, 8.9, 12.0) have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

_Config = TypeVar("_Config")

ARCHITECTURES = (80, 90)  # compute capability 8.x, and 9.0 and above

# Tokens of a chunk and rank rows of a tile, in decode and prefill alike: 32 reads A and B half as often in a prefill
# as 16, and a decode does not feel it, since masked rows are not loaded.
LORA_BLOCK_M = 32
LORA_BLOCK_R = 32
# Programs that fill every supported GPU without splitting the features: three for each of 132 multiprocessors, and
# some that find nothing to do since their selection has a small rank.
LORA_FULL_GRID = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkConfig:
    """Tiles of `x @ A^T`."""

    num_splits: int  # of in_features
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandConfig:
    """Tiles of `y += (x @ A^T) @ B`."""

    block_n: int
    block_r: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Tiles of attention with one query token a sequence."""

    partition: int  # keys of a program
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig:
    """Tiles of attention with several query tokens a sequence."""

    block_m: int  # query tokens times the query heads that share a key head
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class W4Config:
    """Tiles of `x @ w` with `w` in 4 bits."""

    block_m: int
    block_n: int
    block_k: int  # at most: a tile is of one group
    num_warps: int
    num_stages: int


Table: TypeAlias = Mapping[tuple[int, int], Sequence[tuple[int, _Config]]]

# Each table: (architecture, bytes of an element) -> (largest size, config), ascending; the last serves all above.

# By in_features. float32 tiles are split in three for the tensor cores, so they are narrower.
SHRINK: Table[ShrinkConfig] = {
    (architecture, itemsize): (
        (1024, ShrinkConfig(num_splits=2, block_k=block_k, num_warps=4, num_stages=num_stages)),
        (4096, ShrinkConfig(num_splits=4, block_k=block_k, num_warps=4, num_stages=num_stages)),
        (8192, ShrinkConfig(num_splits=8, block_k=block_k, num_warps=4, num_stages=num_stages)),
    )
    for architecture in ARCHITECTURES
    for itemsize, block_k, num_stages in ((2, 128, 3), (4, 32, 2))
}

# By out_features of the widest slice. Narrow tiles of ranks: the partial sums of all splits are loaded with them.
EXPAND: Table[ExpandConfig] = {
    (architecture, 2): (
        (4096, ExpandConfig(block_n=64, block_r=16, num_warps=4, num_stages=2)),
        (8192, ExpandConfig(block_n=128, block_r=16, num_warps=4, num_stages=2)),
    )
    for architecture in ARCHITECTURES
} | {
    (architecture, 4): ((4096, ExpandConfig(block_n=64, block_r=16, num_warps=4, num_stages=2)),)
    for architecture in ARCHITECTURES
}

# A sequence's keys are cut into at most so many parts, which bounds the grid of a captured batch and its scratch.
DECODE_MAX_PARTS = 32

# By head_dim.
DECODE: Table[DecodeConfig] = {
    (architecture, itemsize): (
        (64, DecodeConfig(partition=256, block_n=64, num_warps=4, num_stages=2)),
        (128, DecodeConfig(partition=256, block_n=128 // itemsize, num_warps=4, num_stages=2)),
        (256, DecodeConfig(partition=256, block_n=64 // itemsize, num_warps=4, num_stages=2)),
    )
    for architecture in ARCHITECTURES
    for itemsize in (2, 4)
}

# By head_dim. float32 runs without tensor cores: small tiles.
PREFILL: Table[PrefillConfig] = {
    (80, 2): (
        (64, PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (128, PrefillConfig(block_m=64, block_n=64, num_warps=8, num_stages=2)),
        (256, PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
    ),
    (90, 2): (
        (64, PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=2)),
        (128, PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)),
        (256, PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)),
    ),
} | {
    (architecture, 4): (
        (128, PrefillConfig(block_m=16, block_n=16, num_warps=8, num_stages=2)),
        (256, PrefillConfig(block_m=16, block_n=16, num_warps=4, num_stages=2)),
    )
    for architecture in ARCHITECTURES
}

# By rows of x. Above the last a weight is widened for the call, and cuBLAS multiplies. float32 takes more registers.
W4: Table[W4Config] = {
    (architecture, 2): (
        (16, W4Config(block_m=16, block_n=64, block_k=64, num_warps=4, num_stages=3)),
        (64, W4Config(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=2)),
    )
    for architecture in ARCHITECTURES
} | {
    (architecture, 4): ((64, W4Config(block_m=16, block_n=64, block_k=32, num_warps=4, num_stages=3)),)
    for architecture in ARCHITECTURES
}
W4_MAX_ROWS = 64

# By out_features: splits of in_features, so that about 256 programs multiply; each takes at least 512 features.
W4_SPLITS = ((2048, 8), (4096, 4), (8192, 2))


def nearest_architecture(compute_capability: tuple[int, int]) -> int:
    """The newest architecture of the table that is not newer than the device: (8, 9) -> 80, (10, 0) -> 90."""
    major, minor = compute_capability
    return max(architecture for architecture in ARCHITECTURES if architecture <= 10 * major + minor)


def shrink_config(architecture: int, *, itemsize: int, in_features: int) -> ShrinkConfig:
    return _row_for(SHRINK[architecture, itemsize], in_features)


def expand_config(architecture: int, *, itemsize: int, out_features: int) -> ExpandConfig:
    """`out_features` of the widest fused slice."""
    return _row_for(EXPAND[architecture, itemsize], out_features)


def decode_config(architecture: int, *, itemsize: int, head_dim: int) -> DecodeConfig:
    return _row_for(DECODE[architecture, itemsize], head_dim)


def prefill_config(architecture: int, *, itemsize: int, head_dim: int) -> PrefillConfig:
    return _row_for(PREFILL[architecture, itemsize], head_dim)


def w4_config(architecture: int, *, itemsize: int, num_rows: int) -> W4Config:
    return _row_for(W4[architecture, itemsize], num_rows)


def w4_splits(*, in_features: int, out_features: int) -> int:
    wanted = next((splits for widest, splits in W4_SPLITS if out_features <= widest), 1)
    return max(1, min(wanted, in_features // 512))


def _row_for(rows: Sequence[tuple[int, _Config]], size: int) -> _Config:
    """The last row serves whatever is larger than all."""
    return next((config for largest, config in rows if size <= largest), rows[-1][1])
