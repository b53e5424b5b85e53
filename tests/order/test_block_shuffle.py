"""Shuffling by blocks: a permutation that keeps to windows of runs, with numbers that stay."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from shardio.order.shuffle import BlockShuffle, WindowedEpochOrder


def order(n: int, run: int, whole: int, seed: int = 0, epoch: int = 0) -> WindowedEpochOrder:
    return WindowedEpochOrder(n, BlockShuffle(run, whole), seed=seed, epoch=epoch)


def all_rows(n: int, run: int, whole: int, seed: int = 0) -> npt.NDArray[np.int64]:
    return order(n, run, whole, seed).at(np.arange(n))


@pytest.mark.parametrize(
    ("n", "run", "whole", "seed", "epoch", "start", "rows"),
    [
        # one window, sorted
        (10, 1, 64, 0, 0, 0, [1, 5, 4, 7, 6, 2, 8, 3, 0, 9]),
        # the end of a window, and the last, shorter one
        (130, 1, 64, 7, 3, 60, [71, 20, 38, 45, 115, 12, 67, 57]),
        (1000, 4, 256, 0, 0, 0, [903, 641, 43, 901, 539, 105]),
        (1001, 4, 256, 2**40 + 5, 2, 995, [153, 610, 340, 969, 65, 849]),
        (1_281_167, 32, 2048, 42, 90, 1_000_000, [1137728, 844611, 137084, 1111496, 880088]),
        (1_281_167, 32, 2048, 42, 90, 1_281_162, [970432, 291367, 985422, 1045146, 1092024]),
        # large windows, and too many runs to be sorted
        ((1 << 40) + 12345, 1024, 65536, 5, 1, 1 << 39, [355413735398, 975786149708, 342134759276]),
    ],
)
def test_a_windowed_order_has_the_rows_it_always_had(
    n: int, run: int, whole: int, seed: int, epoch: int, start: int, rows: list[int]
) -> None:
    made = order(n, run, whole, seed, epoch)
    assert made.at(np.arange(start, start + len(rows))).tolist() == rows


@pytest.mark.parametrize(("n", "run", "whole"), [(300_001, 4, 256), (362_144, 1 << 12, 1 << 18)])
def test_long_runs_and_windows_give_every_row_once(n: int, run: int, whole: int) -> None:
    assert np.array_equal(np.sort(all_rows(n, run, whole)), np.arange(n))


def test_a_window_reads_few_runs_each_nearly_whole() -> None:
    n, run, whole = 100_100, 16, 1024
    rows = all_rows(n, run, whole)
    for start in range(0, n, whole):
        numbers, counts = np.unique(rows[start : start + whole] // run, return_counts=True)
        assert len(numbers) <= whole // run + 2
        assert (counts == run).sum() >= len(numbers) - 3


@pytest.mark.parametrize(
    ("n_bytes", "n_samples", "run"),
    [
        (0, 0, 1 << 32),
        (100 << 20, 100, 4),
        (101 << 20, 100, 2),
        (6152 * 1000, 1000, 512),
        (5 << 40, 1 << 20, 1),
    ],
)
def test_a_run_fits_in_four_mebibytes(n_bytes: int, n_samples: int, run: int) -> None:
    assert BlockShuffle.of(n_bytes, n_samples) == BlockShuffle(run, 64 * run)
