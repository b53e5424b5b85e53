"""Mixtures, as arithmetic: which source and which sample each position has, and how many there are.

Seeds are fixed: these tests cannot fail by chance. Bounds are five deviations.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import InvalidArgument
from shardio.order import FullShuffle, Sequential
from shardio.order.mixture_order import (
    MAX_SHARE_SUM,
    SPAN,
    Exhausted,
    MixtureEpochOrder,
    MixtureShares,
    MixtureSizes,
)
from shardio.order.shuffle import BlockShuffle
from tests.loading import samples

Numbers = npt.NDArray[np.int64]

SHARES = st.lists(st.integers(1, MAX_SHARE_SUM // 12), min_size=1, max_size=12).map(tuple)


def mixture_sizes(
    weights: list[float], sizes: list[int], exhausted: Exhausted = "repeat"
) -> MixtureSizes:
    shares = tuple(max(1, round(MAX_SHARE_SUM * each / sum(weights))) for each in weights)
    firsts = tuple(np.cumsum([0, *sizes])[:-1].tolist())
    return MixtureSizes(MixtureShares(shares, exhausted), tuple(sizes), firsts)


def order(
    of: MixtureSizes,
    *,
    shuffle: bool = True,
    window: BlockShuffle | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> MixtureEpochOrder:
    chosen = window or (FullShuffle() if shuffle else Sequential())
    return MixtureEpochOrder(chosen, of, samples(sum(of.sizes)), seed=seed, epoch=epoch)


def whole(of: MixtureSizes, **options: Any) -> Numbers:
    return order(of, **options).at(np.arange(of.n_positions))


# How many positions there are.


@given(SHARES, st.integers(0, 1 << 48))
def test_counts_add_up_never_fall_and_follow_shares(shares: tuple[int, ...], n: int) -> None:
    mixing = MixtureShares(shares, "stop")
    counts, after = mixing.counts(n), mixing.counts(n + 1)
    assert sum(counts) == n
    steps = sorted(b - a for a, b in zip(counts, after, strict=True))
    assert steps == [*[0] * (len(shares) - 1), 1]
    both = np.stack(mixing.counts(np.array([n, n + 1])), axis=1)
    assert both.tolist() == [counts, after]
    n_halvings = math.ceil(math.log2(len(shares)))
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - Fraction(n * share, sum(shares))) <= n_halvings


def brute(of: MixtureSizes) -> int:
    for n in itertools.count():
        counts, after = of.mixing.counts(n), of.mixing.counts(n + 1)
        pairs = list(zip(counts, after, of.sizes, strict=True))
        if of.mixing.exhausted == "stop" and any(more > size for _, more, size in pairs):
            return n
        if of.mixing.exhausted == "repeat" and all(count >= size for count, _, size in pairs):
            return n
    raise AssertionError("no end")


@given(st.data(), st.sampled_from(["stop", "repeat"]))
def test_epochs_end_as_exhausted_says(data: st.DataObject, exhausted: Exhausted) -> None:
    shares = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(shares), max_size=len(shares)))
    made = MixtureSizes(MixtureShares(tuple(shares), exhausted), tuple(sizes), (0,) * len(sizes))
    assert made.n_positions == brute(made)


def test_an_epoch_that_would_not_end_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="an epoch that draws every sample would have"):
        _ = mixture_sizes([1e-9, 1], [1 << 40, 1]).n_positions
    assert mixture_sizes([1e-9, 1], [1 << 40, 1], "stop").n_positions == 1


# What comes.


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("sizes", [[1000, 300, 1], [70_000, 90, 7]])
def test_a_source_that_ends_stops_the_epoch_or_begins_again(sizes: list[int], shuffle: Any) -> None:
    weights = [6, 3, 0.01]
    stopped = whole(mixture_sizes(weights, sizes, "stop"), shuffle=shuffle)
    assert len({*stopped.tolist()}) == len(stopped)  # nothing twice
    firsts = np.cumsum([0, *sizes])
    counts = np.histogram(stopped, firsts)[0]
    assert (counts == sizes).any() and (counts <= sizes).all()
    repeated = whole(mixture_sizes(weights, sizes, "repeat"), shuffle=shuffle)
    times = np.bincount(repeated, minlength=firsts[-1])
    assert times.min() == 1
    for first, behind in itertools.pairwise(firsts.tolist()):
        assert np.ptp(times[first:behind]) <= 1  # a round is over before the next begins


def test_without_shuffle_sources_come_in_their_order_but_the_choice_is_drawn() -> None:
    made = mixture_sizes([2, 1], [100, 40])
    first, other = whole(made, shuffle=False), whole(made, shuffle=False, epoch=1)
    for found in (first, other):
        assert found[found < 100].tolist() == [i % 100 for i in range((found < 100).sum())]
        assert (found[found >= 100] - 100).tolist() == [i % 40 for i in range((found >= 100).sum())]
    assert first.tolist() != other.tolist()


@pytest.mark.parametrize("window", [None, BlockShuffle(4, 256)])
def test_a_round_is_shuffled_anew_each_time(window: BlockShuffle | None) -> None:
    made = mixture_sizes([3, 1], [3000, 300])
    found = whole(made, window=window, shuffle=window is None)
    small = found[found >= 3000]
    rounds = [small[i * 300 : (i + 1) * 300].tolist() for i in range(len(small) // 300)]
    assert len(rounds) > 2
    assert all(sorted(each) == list(range(3000, 3300)) for each in rounds)
    assert len({*map(tuple, rounds)}) == len(rounds)


def test_blocks_keep_to_windows_of_each_source() -> None:
    sizes, window = [8192, 4096], BlockShuffle(4, 256)
    found = whole(mixture_sizes([2, 1], sizes), window=window, shuffle=False)
    for first, size in zip((0, 8192), sizes, strict=True):
        of_source = found[(found >= first) & (found < first + size)]
        for start in range(0, size, window.window_rows):
            in_window = np.sort(of_source[start : start + window.window_rows])
            assert (np.diff(in_window.reshape(-1, 4)) == 1).all()  # whole runs
    fully = whole(mixture_sizes([2, 1], sizes))
    fully = np.sort(fully[fully < 8192][: window.window_rows])
    assert not (np.diff(fully.reshape(-1, 4)) == 1).all()


def test_the_first_places_of_a_mixture_are_what_they_were() -> None:
    made = mixture_sizes([5, 2, 1], [70_000, 50, 9])
    first, blocks = (
        [40359, 63574, 48084, 66425, 5050, 70052, 34167, 70000, 70058, 59969, 70018, 70055],
        [64144, 18165, 41738, 39348, 63541, 70052],
    )
    assert order(made, seed=3, epoch=2).at(np.arange(12)).tolist() == first
    windowed = order(made, seed=3, epoch=2, window=BlockShuffle(8, 512), shuffle=False)
    assert windowed.at(np.arange(6)).tolist() == blocks
    last = made.n_positions - 1
    assert (last, order(made, seed=3, epoch=2).at(np.array([last])).tolist()) == (111999, [70008])


def test_every_span_has_its_sources_in_proportion() -> None:
    weights = [0.5, 0.3, 0.1999, 0.0001]
    made = mixture_sizes(weights, [100_000, 100_000, 100_000, 1000])
    n = 1 << 18
    sources = order(made).draws(np.arange(n))[0].astype(np.int64)
    by_span = np.stack([(sources.reshape(-1, SPAN) == s).sum(1) for s in range(4)], axis=1)
    assert (np.abs(by_span - SPAN * np.array(weights)) < 2).all()
    assert np.abs(by_span.sum(0) - n * np.array(weights)).max() < 3
