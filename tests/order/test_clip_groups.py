"""Groups of clips: every clip once, neighbours together, groups of one video far from each other.

Seeds are fixed: these tests cannot fail by chance. Bounds are five deviations.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.order.clip_groups import ClipGroupEpochOrder, ClipGrouping, ClipGroups

Numbers = npt.NDArray[np.int64]
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def order(
    counts: list[int] | Numbers, k: int, seed: int = 0, epoch: int = 0
) -> ClipGroupEpochOrder:
    return ClipGroupEpochOrder(
        ClipGroups(np.cumsum(counts), k, int(sum(counts))), seed=seed, epoch=epoch
    )


def whole(counts: list[int] | Numbers, k: int, seed: int = 0, epoch: int = 0) -> Numbers:
    return order(counts, k, seed, epoch).at(np.arange(sum(counts)))


def videos_of(clips: Numbers, counts: list[int] | Numbers) -> Numbers:
    return np.searchsorted(np.cumsum(counts), clips, "right")


@given(COUNTS, st.integers(1, 50))
def test_clips_of_a_video_form_as_few_groups_as_possible(counts: list[int], k: int) -> None:
    found = whole(counts, k)
    videos = videos_of(found, counts)
    n_runs = 1 + np.count_nonzero((np.diff(found) != 1) | (np.diff(videos) != 0))
    assert n_runs <= sum(-(-n // k) for n in counts)


@pytest.mark.parametrize(
    ("counts", "k", "seed", "epoch", "start", "clips"),
    [
        ([5, 0, 3, 4], 3, 0, 0, 0, [5, 6, 7, 0, 1, 2, 11, 3, 4, 8, 9, 10]),
        ([18] * 200, 8, 7, 3, 1000, [3534, 3535, 2158, 2159, 1890, 1891, 1892, 1893, 1894]),
        (
            [40, 7, 1, 300] * 5000,
            16,
            2**40 + 5,
            1,
            1_000_000,
            [585245, 585246, 585247, 585248, 585249, 585250, 585251, 585252, 585253],
        ),
    ],
)
def test_an_order_of_groups_has_the_clips_it_always_had(
    counts: list[int], k: int, seed: int, epoch: int, start: int, clips: list[int]
) -> None:
    positions = np.arange(start, start + len(clips))
    assert order(counts, k, seed, epoch).at(positions).tolist() == clips


def test_which_clips_of_a_video_are_few_changes_with_the_epoch() -> None:
    firsts = set()
    for epoch in range(30):
        found = whole([10, 10], 4, 0, epoch)
        # Of 10 clips four, four and two: two begin with clip 0, 4 or 8.
        follows = np.diff(found, prepend=-9) == 1
        starts = np.append(np.flatnonzero(~follows), len(found))
        short = found[starts[:-1][np.diff(starts) == 2]]
        firsts |= {*(short[short < 10]).tolist()}
    assert firsts == {0, 4, 8}


def test_no_window_has_more_than_its_share_of_a_size() -> None:
    # Ten videos of nine clips among hundreds of eight: their last ones lie in different windows.
    counts = [9] * 10 + [8] * 8192
    shares = np.zeros(8)
    for seed in range(40):
        found = whole(counts, 8, seed)
        at = np.flatnonzero(videos_of(found, counts) < 10)
        shares += np.bincount(at * 8 // len(found), minlength=8)
    assert np.abs(shares - shares.mean()).max() < 5 * np.sqrt(shares.mean() * 4)


@pytest.mark.parametrize(("counts", "k"), [([18] * 200, 8), ([18] * 200, 4), ([300] * 20, 8)])
def test_a_batch_has_at_most_k_clips_of_a_video(counts: list[int], k: int) -> None:
    for epoch in range(10):
        videos = videos_of(whole(counts, k, 0, epoch), counts)
        batches = videos[: len(videos) // 32 * 32].reshape(-1, 32)
        assert max(np.bincount(each).max() for each in batches) <= k


def test_what_came_later_changes_nothing_in_an_epoch_that_had_begun() -> None:
    before, after = np.cumsum([18, 3, 40]), np.cumsum([18, 3, 40, 7, 90])
    grown = ClipGrouping(4, [after])
    found = ClipGroupEpochOrder(grown.groups(61), seed=3, epoch=1).at(np.arange(61))
    expected = ClipGroupEpochOrder(ClipGrouping(4, [before]).groups(61), seed=3, epoch=1).at(
        np.arange(61)
    )
    assert np.array_equal(found, expected)
    assert grown.groups(158).counts.sum() > grown.groups(61).counts.sum()
