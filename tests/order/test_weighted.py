"""Weighted draws: how often each row comes, and numbers that stay."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest

from shardio.format.checksum import hash_bytes
from shardio.order.sampling import WeightedEpochOrder, draw_without_replacement, natural_log

WEIGHTS = np.array([1, 2, 0, 3, 4.5, 0.25])
MANY = np.sqrt(np.arange(1, 100_001))


def order(weights: npt.NDArray[np.float64], seed: int = 0, epoch: int = 0) -> WeightedEpochOrder:
    return WeightedEpochOrder(np.cumsum(weights), seed=seed, epoch=epoch)


@pytest.mark.parametrize(
    ("seed", "epoch", "again", "once"),
    [
        (0, 0, [4, 3, 3, 3, 4, 5, 3, 1, 1, 3, 3, 4], [3, 1, 4, 5, 0]),
        (7, 3, [3, 3, 4, 4, 3, 3, 4, 3, 4, 4, 1, 4], [3, 1, 4, 0, 5]),
        (2**40 + 5, 2, [4, 4, 3, 3, 3, 3, 4, 4, 4, 1, 3, 5], [4, 3, 1, 0, 5]),
    ],
)
def test_draws_are_unchanged(seed: int, epoch: int, again: list[int], once: list[int]) -> None:
    assert order(WEIGHTS, seed, epoch).at(np.arange(12)).tolist() == again
    assert draw_without_replacement(WEIGHTS, 5, seed=seed, epoch=epoch).tolist() == once


def test_many_draws_are_what_they_always_were() -> None:
    positions = np.arange(10**12, 10**12 + 6)
    drawn = order(MANY, 3, 1).at(positions)
    assert drawn.tolist() == [49182, 49443, 27874, 72659, 87467, 15104]
    once = draw_without_replacement(MANY, 100_000, seed=3, epoch=1)
    assert once[:6].tolist() == [90477, 95326, 55844, 34600, 89063, 69492]
    assert hash_bytes(once.astype("<i8").data) == 4632390524695521432


def test_without_replacement_orders_come_as_often_as_single_draws_would_give_them() -> None:
    weights, n = np.array([1.0, 2, 4]), 14_000
    found = [
        tuple(draw_without_replacement(weights, 3, seed=seed, epoch=2).tolist())
        for seed in range(n)
    ]
    chi_square = 0.0
    for each in itertools.permutations(range(3)):
        first, second = weights[each[0]], weights[each[1]]
        expected = n * first / 7 * second / (7 - first)
        chi_square += (found.count(each) - expected) ** 2 / expected
    assert chi_square < 20.5  # of 5, one in 1000


@pytest.mark.parametrize("weights", [[0, 0, 1, 0], [0, 5e-324, 0], [0, 1e308, 0, 1e-300]])
def test_the_last_and_the_smallest_weights_are_no_exception(weights: list[float]) -> None:
    given = np.array(weights)
    drawn = order(given).at(np.arange(1000))
    assert set(drawn.tolist()) <= set(np.flatnonzero(given).tolist())
    n = int(np.count_nonzero(given))
    once = draw_without_replacement(given, n, seed=0, epoch=0)
    assert sorted(once.tolist()) == np.flatnonzero(given).tolist()


def test_the_logarithm_is_that_of_the_library_to_the_last_bits() -> None:
    numbers = np.concatenate([np.linspace(1e-6, 1, 10_000), 2.0 ** -np.arange(54), [1 - 2.0**-53]])
    expected = np.array([math.log(each) for each in numbers.tolist()])
    assert np.allclose(natural_log(numbers), expected, rtol=1e-15, atol=0)
