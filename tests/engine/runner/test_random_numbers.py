from __future__ import annotations

import numpy as np

from loraplex.engine.runner.random_numbers import uniforms

_MASK = (1 << 64) - 1


def _splitmix64(state: int) -> int:
    x = state & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def test_number_is_the_published_splitmix64_stream_of_the_hashed_seed() -> None:
    gamma = 0x9E3779B97F4A7C15
    assert _splitmix64(gamma) == 0xE220A8397B1DCDAF  # first output of the reference program for seed 0
    for seed, position in ((0, 0), (7, 3), (-1, 5), ((1 << 63) - 1, 100_000)):
        state = _splitmix64(seed + gamma)
        expected = (_splitmix64(state + (position + 1) * gamma) >> 11) * 2.0**-53
        assert uniforms([seed], [position])[0] == expected


def test_neighbours_in_the_batch_change_nothing() -> None:
    together = uniforms([3, 9, 3, -2], [0, 0, 1, 7])
    assert together.tolist() == [
        uniforms([seed], [position])[0] for seed, position in ((3, 0), (9, 0), (3, 1), (-2, 7))
    ]


def test_numbers_are_uniform_over_positions_and_over_neighbouring_seeds() -> None:
    size = 20_000
    for numbers in (uniforms([5] * size, range(size)), uniforms(range(size), [0] * size)):
        counts, _ = np.histogram(numbers, bins=64, range=(0, 1))
        chi_square = float(((counts - size / 64) ** 2 / (size / 64)).sum())
        assert chi_square < 110  # 99.98 % of the distribution with 63 degrees of freedom


def test_streams_of_neighbouring_seeds_do_not_follow_each_other() -> None:
    size = 10_000
    streams = np.stack([uniforms([seed] * size, range(size)) for seed in range(4)])
    correlation = np.corrcoef(streams) - np.eye(4)
    assert np.abs(correlation).max() < 0.05
    assert not set(streams[0]) & set(streams[1])


def test_numbers_stay_below_one() -> None:
    numbers = uniforms(range(50_000), [1] * 50_000)
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
