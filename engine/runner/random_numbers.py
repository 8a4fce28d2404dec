"""Random numbers that are a function of (seed, output position) and of nothing else.

No generator state exists, so preemption, the order of requests and their neighbours cannot change a number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN_GAMMA = np.uint64(0x9E37_79B9_7F4A_7C15)
_UINT64_MASK = (1 << 64) - 1


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number of [0, 1) with 53 random bits per (seed, position) pair: float64 `[len(seeds)]`.

    The stream of a seed is SplitMix64 (Steele, Lea and Flood, 2014), whose n-th number is a hash of state + n * gamma.
    The seed is hashed once more to become the state, since neighbouring seeds (the choices of one request) would
    otherwise start on states that lie close together.
    """
    state = _mix(np.array([seed & _UINT64_MASK for seed in seeds], dtype=np.uint64) + _GOLDEN_GAMMA)
    counter = np.asarray(positions, dtype=np.uint64) + np.uint64(1)
    bits: NDArray[np.uint64] = _mix(state + counter * _GOLDEN_GAMMA) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer: a bijection of the 64-bit integers in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return x ^ (x >> np.uint64(31))
