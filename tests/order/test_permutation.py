"""Orders are part of what users can rely on: their numbers are written down here."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from shardio.order.permutation import (
    SORTED_MAX,
    Permutation,
    SampleGenerators,
    derive_key,
    epoch_permutation,
    permute,
    substitute_position,
)

LARGE = 3_000_000
"""Domains up to this size are permuted whole in these tests."""


def order(n: int, seed: int = 0, epoch: int = 0) -> Permutation:
    return epoch_permutation(n, seed=seed, epoch=epoch)


def whole(n: int, seed: int = 0, epoch: int = 0) -> npt.NDArray[np.int64]:
    return order(n, seed, epoch).at(np.arange(n))


def is_permutation(rows: npt.NDArray[np.int64], n: int) -> bool:
    return len(rows) == n and np.array_equal(np.sort(rows), np.arange(n))


# Golden vectors: whatever changes one of these numbers changes what every seed means.


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ((0,), 0xE220A8397B1DCDAF),  # the first number of splitmix64 with seed 0
        ((1, 0, 0), 0xFC042709560421DA),
        ((1, 7, 3), 0x584004D706427809),
        ((1, 1 << 64, 0), 0x03F14E4FAC325EFA),
        ((1, 1 << 200, 0), 0x5D8A83D1CEB6E2CB),
    ],
)
def test_a_key_is_the_number_it_always_was(parts: tuple[int, ...], key: int) -> None:
    assert derive_key(*parts) == key


@pytest.mark.parametrize(
    ("n", "seed", "epoch", "start", "rows"),
    [
        # sorted
        (1, 0, 0, 0, [0]),
        (2, 0, 0, 0, [1, 0]),
        (2, 1, 0, 0, [0, 1]),
        (10, 0, 0, 0, [8, 3, 6, 4, 9, 1, 7, 5, 0, 2]),
        (10, 7, 3, 0, [7, 2, 5, 6, 8, 1, 0, 9, 4, 3]),
        (65536, 0, 0, 0, [45453, 32768, 43926, 31440, 54168]),
        (65536, 2**40 + 5, 2, 65532, [7784, 59521, 63257, 62538]),
        # Feistel, 32 bits
        (65537, 0, 0, 0, [53555, 31223, 28151, 4026, 3076]),
        (65537, 7, 3, 65527, [28485, 25511, 38892, 1571, 61384]),
        (1_281_167, 0, 0, 0, [679252, 9355, 1242178, 1159869, 394540]),
        (1_281_167, 42, 90, 1_000_000, [1276359, 632773, 1031918, 633539, 1262946]),
        (1 << 24, 3, 1, (1 << 24) - 5, [5234224, 5374781, 8755239, 3199166, 5390020]),
        # Feistel, 32 bits, rows or columns too many to be scaled at once
        ((1 << 24) + 1, 3, 1, 9, [5362313, 9129117, 12317551, 15850206, 3860569]),
        (1 << 32, 0, 0, 1 << 31, [3886540122, 870106318, 193771833, 957526135]),
        # Feistel, 64 bits
        ((1 << 32) + 1, 0, 0, (1 << 32) - 9, [1006822888, 807921323, 76053751]),
        ((1 << 40) + 12345, 2**40 + 5, 2, 1 << 39, [291774425641, 618710906677, 841990395278]),
        (1 << 48, 0, 0, (1 << 48) - 10, [177995581534263, 255299367569026, 51129618473261]),
    ],
)
def test_orders_are_unchanged(n: int, seed: int, epoch: int, start: int, rows: list[int]) -> None:
    assert order(n, seed, epoch).at(start + np.arange(len(rows))).tolist() == rows


@pytest.mark.parametrize(
    ("seed", "epoch", "position", "key", "raw"),
    [
        (0, 0, 0, 10422960368320252623, 1581431921338572044),
        (0, 0, 1, 1151613137436240227, 968638683398913245),
        (7, 3, 123456, 9632017738966848375, 6344611085269766682),
        (2**40 + 5, 2, 2**40, 6640646749426985113, 1809283951105590352),
    ],
)
def test_generators_are_unchanged(seed: int, epoch: int, position: int, key: int, raw: int) -> None:
    generators = SampleGenerators(seed)
    bits: Any = generators.at(epoch, position).bit_generator
    # Raw bits: NumPy freezes Philox's stream, but not what Generator makes of it.
    assert (generators.key(epoch, position), int(bits.random_raw())) == (key, raw)


# Permutations.


# Where the grid of the network changes its shape: squares, and products of neighbours.
EDGES = sorted(
    {
        w * h + d
        for w in (256, 257, 300, 1024, 1415)
        for h in (w - 1, w, w + 1)
        for d in (-1, 0, 1)
        if w * h + d > SORTED_MAX
    }
)


@pytest.mark.parametrize("n", sorted({65538, 1_281_167, LARGE, *EDGES}))
def test_an_epoch_above_the_sorted_sizes_has_every_row_once(n: int) -> None:
    assert is_permutation(permute(np.arange(n), n, derive_key(n)), n)


@pytest.mark.parametrize(
    "n", [(1 << 32) - 1, 1 << 32, (1 << 32) + 1, 65537**2, 65537**2 + 1, (1 << 40) + 7, 1 << 48]
)
def test_huge_orders_repeat_no_row_and_stay_in_range(n: int) -> None:
    rng = random.Random(n)
    positions = np.array(sorted(rng.sample(range(n), 50_000) + [0, n - 1]), np.int64)
    positions = np.unique(positions)
    found = permute(positions, n, derive_key(5))
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(positions)


@pytest.mark.parametrize("a", [0, 1, (1 << 64) - 1, 1 << 64, 1 << 128, 1 << 192])
@pytest.mark.parametrize("b", [2, (1 << 64) + 1, 1 << 127, 1 << 129, 1 << 200])
def test_seeds_of_any_size_are_kept_apart(a: int, b: int) -> None:
    assert derive_key(1, a, 0) != derive_key(1, b, 0)


def chi_square_per_cell(counts: npt.NDArray[Any]) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2).sum() / expected / counts.size)


# Generators of samples.


def test_a_generator_draws_the_same_whatever_was_drawn_before() -> None:
    fresh = SampleGenerators(3).at(2, 17)
    expected = fresh.random(5), fresh.integers(0, 100, 3, np.int32)
    used = SampleGenerators(3)
    used.at(0, 0).random(1001)
    used.at(2, 16).integers(0, 100, 1, np.int32)  # leaves half of a 64-bit number behind
    again = used.at(2, 17)
    assert np.array_equal(again.random(5), expected[0])
    assert np.array_equal(again.integers(0, 100, 3, np.int32), expected[1])


def test_every_sample_epoch_and_seed_has_a_generator_of_its_own() -> None:
    drawn = {
        float(SampleGenerators(seed).at(epoch, position).random())
        for seed in range(5)
        for epoch in range(5)
        for position in range(40)
    }
    assert len(drawn) == 5 * 5 * 40


def test_first_draws_of_neighbouring_samples_are_spread_evenly() -> None:
    generators = SampleGenerators(0)
    drawn = np.array([generators.at(0, i).random() for i in range(20_000)])
    counts = np.bincount((drawn * 100).astype(np.int64), minlength=100)
    assert chi_square_per_cell(counts) < 2
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.035


# Substitutes.


def test_the_substitutes_of_a_position_are_those_of_every_version() -> None:
    found = [substitute_position(10**12, seed=3, epoch=1, position=7, attempt=i) for i in range(3)]
    assert found == [559216620063, 742533139768, 367821083998]


def test_substitutes_differ_by_seed_epoch_position_and_attempt_and_are_spread_evenly() -> None:
    keys = [(s, e, p, a) for s in range(5) for e in range(5) for p in range(40) for a in range(20)]
    found = [
        substitute_position(1 << 62, seed=s, epoch=e, position=p, attempt=a) for s, e, p, a in keys
    ]
    assert len(set(found)) == len(keys)
    counts = np.bincount([each * 100 >> 62 for each in found], minlength=100)
    assert chi_square_per_cell(counts) < 2
    few = {substitute_position(3, seed=0, epoch=0, position=0, attempt=i) for i in range(50)}
    assert few == {0, 1, 2}
