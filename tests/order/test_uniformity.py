"""Statistics of every kind of order: positions, pairs and neighbours, for n = 1…1000.

Seeds are fixed: these tests cannot fail by chance. Bounds are five deviations, or one in 1000.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from shardio.order.permutation import epoch_permutation
from shardio.order.sampling import WeightedEpochOrder, draw_without_replacement
from shardio.order.shuffle import BlockShuffle, ShardEpochOrder, WindowedEpochOrder

Rows = npt.NDArray[np.int64]
Kind = Callable[[int, int], Rows]


def full(n: int, seed: int) -> Rows:
    return epoch_permutation(n, seed=seed, epoch=0).at(np.arange(n))


def blocks(n: int, seed: int) -> Rows:
    return WindowedEpochOrder(n, BlockShuffle(1, 64), seed=seed, epoch=0).at(np.arange(n))


def blocks_of_runs(n: int, seed: int) -> Rows:
    """One window for most sizes; runs of 8."""
    return WindowedEpochOrder(n, BlockShuffle(8, 512), seed=seed, epoch=0).at(np.arange(n))


def shards_of_one(n: int, seed: int) -> Rows:
    return ShardEpochOrder(np.arange(1, n + 1), n, 8, seed=seed, epoch=0).at(np.arange(n))


def one_shard(n: int, seed: int) -> Rows:
    return ShardEpochOrder(np.array([n]), n, 8, seed=seed, epoch=0).at(np.arange(n))


def drawn_once(n: int, seed: int) -> Rows:
    return draw_without_replacement(np.full(n, 0.3), n, seed=seed, epoch=0)


def drawn(n: int, seed: int) -> Rows:
    sums = np.cumsum(np.full(n, 0.3))
    return WeightedEpochOrder(sums, seed=seed, epoch=0).at(np.arange(n))


PERMUTATIONS = pytest.mark.parametrize(
    "kind", [full, blocks, blocks_of_runs, shards_of_one, one_shard, drawn_once]
)
KINDS = pytest.mark.parametrize("kind", [full, blocks, drawn_once, drawn])


@PERMUTATIONS
@pytest.mark.parametrize(("n", "bound"), [(2, 10.9), (3, 20.6), (4, 49.8)])
def test_small_orders_are_each_permutation_equally_often(kind: Kind, n: int, bound: float) -> None:
    n_seeds = 100 * math.factorial(n)
    counts = Counter(tuple(kind(n, seed).tolist()) for seed in range(n_seeds))
    expected = n_seeds / math.factorial(n)
    found = [counts[each] for each in itertools.permutations(range(n))]
    assert sum((each - expected) ** 2 for each in found) / expected < bound


def standardised(rows: Rows) -> npt.NDArray[np.float64]:
    """Rows as numbers of mean 0 and variance 1, if every row is equally likely."""
    n = len(rows)
    centred = rows.astype(np.float64) - (n - 1) / 2
    return centred / math.sqrt((n * n - 1) / 12)


@KINDS
def test_positions_and_pairs_are_uniform_for_every_size_up_to_1000(kind: Kind) -> None:
    sums: dict[str, list[float]] = {name: [] for name in ("row", "square", "pair", "neighbours")}
    assert kind(1, 0).tolist() == [0]
    for n, k in itertools.product(range(2, 1001), range(4)):
        # Seeds of their own: hashes of the same positions under one key are the same for every n.
        rows = kind(n, 4 * n + k)
        value = standardised(rows)
        i, j = n * k // 4, (n * k // 4 + max(1, n // 3)) % n
        sums["row"].append(value[i])
        kurtosis = 1.8 - 2.4 / (n * n - 1)
        sums["square"].append((value[i] ** 2 - 1) / math.sqrt(max(kurtosis - 1, 1)))
        expected = 0 if kind is drawn else -1 / (n - 1)
        sums["pair"].append(value[i] * value[j] - expected)
        near = int((np.abs(np.diff(rows)) == 1).sum())
        likely = 2 * (n - 1) / n**2 if kind is drawn else 2 / n
        sums["neighbours"].append(near - (n - 1) * likely)
    for name, values in sums.items():
        found = np.array(values)
        deviations = found.sum() / (found.std() * math.sqrt(len(found)))
        assert abs(deviations) < 4, name
