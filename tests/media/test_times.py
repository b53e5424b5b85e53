"""Frames get times that rise in order of presentation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import MediaError
from shardio.media.times import REORDER_WINDOW, Rising, settled


@given(st.lists(st.integers(0, 50), max_size=80))
def test_times_that_rise_stay_as_they_are(steps: list[int]) -> None:
    times = [sum(steps[: n + 1]) for n in range(len(steps))]
    frames = list(zip(times, range(len(times)), strict=True))
    assert list(settled(frames)) == frames


@given(st.permutations(range(100)), st.integers(1, REORDER_WINDOW))
def test_times_within_the_window_are_sorted_and_frames_keep_their_order(
    order: list[int], reach: int
) -> None:
    # Sorting runs of `reach` by another key moves no time further than the window looks.
    times = [
        time
        for start in range(0, 100, reach)
        for time in sorted(range(start, min(start + reach, 100)), key=order.index)
    ]
    assert list(settled(zip(times, range(100), strict=True))) == [(n, n) for n in range(100)]


def test_coding_order_numbers_as_avi_gives_them_become_1_2_3_4() -> None:
    frames = zip([1, 2, 4, 3, 6, 5], "abcdef", strict=True)
    assert [time for time, _ in settled(frames)] == [1, 2, 3, 4, 5, 6]


def test_a_clock_that_starts_anew_is_left_alone() -> None:
    times = [*range(1000, 1040), *range(7, 47)]
    assert [time for time, _ in settled((time, None) for time in times)] == times


def test_frames_before_an_error_come_out_before_it() -> None:
    def failing() -> Iterator[tuple[int, str]]:
        yield from zip([1, 3, 2], "abc", strict=True)
        raise MediaError("cut")

    found: list[tuple[int, str]] = []
    with pytest.raises(MediaError, match="cut"):
        found.extend(settled(failing()))
    assert found == [(1, "a"), (2, "b"), (3, "c")]


def test_frames_flow_before_the_stream_ends() -> None:
    taken = []

    def endless() -> Iterator[tuple[int, int]]:
        for n in range(10_000):
            taken.append(n)
            yield n, n

    assert next(settled(endless())) == (0, 0)
    assert len(taken) == REORDER_WINDOW + 1


@pytest.mark.parametrize(
    ("times", "found", "n_changed"),
    [
        ([3, 5, 9], [3, 5, 9], 0),
        ([3, 5, 5, 9], [3, 5, 6, 9], 1),  # two frames with one time
        ([10, 14, 2, 6, 8], [10, 14, 18, 22, 24], 3),  # a clock that starts anew
        ([10, 14, 14, 14, 15, 30], [10, 14, 15, 16, 17, 30], 3),
    ],
)
def test_times_are_made_to_rise(times: list[int], found: list[int], n_changed: int) -> None:
    rising = Rising()
    assert [rising(time) for time in times] == found
    assert rising.n_changed == n_changed
