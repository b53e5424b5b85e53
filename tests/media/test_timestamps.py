"""Frames get times that rise in order of presentation."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardio.errors import MediaError
from shardio.media.timestamps import (
    REORDER_WINDOW,
    MonotonicTimestamps,
    fill_missing_times,
    frame_interval,
    in_presentation_order,
    round_to_tick,
)


@given(st.lists(st.integers(0, 50), max_size=80))
def test_times_that_rise_stay_as_they_are(steps: list[int]) -> None:
    times = [sum(steps[: n + 1]) for n in range(len(steps))]
    frames = list(zip(times, range(len(times)), strict=True))
    assert list(in_presentation_order(frames)) == frames


@given(st.permutations(range(100)), st.integers(1, REORDER_WINDOW))
def test_times_within_the_window_are_sorted(order: list[int], reach: int) -> None:
    # Sorting runs of `reach` by another key moves no time further than the window looks.
    times = [
        time
        for start in range(0, 100, reach)
        for time in sorted(range(start, min(start + reach, 100)), key=order.index)
    ]
    assert list(in_presentation_order(zip(times, range(100), strict=True))) == [
        (n, n) for n in range(100)
    ]


def test_a_clock_that_starts_anew_is_left_alone() -> None:
    times = [*range(1000, 1040), *range(7, 47)]
    assert [time for time, _ in in_presentation_order((time, None) for time in times)] == times


def test_frames_before_an_error_come_out_before_it() -> None:
    def failing() -> Iterator[tuple[int, str]]:
        yield from zip([1, 3, 2], "abc", strict=True)
        raise MediaError("cut")

    found: list[tuple[int, str]] = []
    with pytest.raises(MediaError, match="cut"):
        found.extend(in_presentation_order(failing()))
    assert found == [(1, "a"), (2, "b"), (3, "c")]


def test_frames_flow_before_the_stream_ends() -> None:
    taken = []

    def endless() -> Iterator[tuple[int, int]]:
        for n in range(10_000):
            taken.append(n)
            yield n, n

    assert next(in_presentation_order(endless())) == (0, 0)
    assert len(taken) == REORDER_WINDOW + 1


@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.fractions(1, 100, max_denominator=999),
    st.integers(-500, 500),
)
def test_missing_times_follow_rate(are_known: list[bool], interval: Fraction, begin: int) -> None:
    """Whichever are missing, and however the durations of the container are rounded."""
    times = [begin + round_to_tick(n * interval) for n in range(len(are_known))]
    known = [time if is_known else None for time, is_known in zip(times, are_known, strict=True)]
    found = fill_missing_times(known, [int(interval)] * len(known), interval)
    offset = 0 if any(are_known) else times[0]
    assert all(abs(a + offset - b) <= 1 for a, b in zip(found, times, strict=True))
    assert all(a == b for a, b in zip(found, known, strict=True) if b is not None)


@given(st.lists(st.tuples(st.integers(1, 90), st.booleans(), st.integers(0, 90)), max_size=60))
def test_known_times_stay_whatever_the_durations_say(frames: list[tuple[int, bool, int]]) -> None:
    times, time = list[int | None](), 0
    for step, is_known, _ in frames:
        time += step
        times.append(time if is_known else None)
    found = fill_missing_times(times, [duration for _, _, duration in frames], Fraction(100, 3))
    assert all(a == b for a, b in zip(found, times, strict=True) if b is not None)
    assert all(a < b for a, b in zip(found, found[1:], strict=False))


@pytest.mark.parametrize(
    ("times", "durations", "found"),
    [
        ([None, None, 0, 40], [40, 40, 40, 40], [-80, -40, 0, 40]),
        ([None, None, 7, 40], [10, 0, 9, 9], [-43, -33, 7, 40]),  # 0: unknown, as by the rate
        ([3, None, None, 100], [30, 30, 30, 9], [3, 33, 63, 100]),
        ([3, None, None, 9], [40, 40, 40, 40], [3, 5, 7, 9]),  # no room: spread
        ([500, None, 0, None], [40, 40, 40, 40], [500, 540, 0, 40]),  # a clock that starts anew
        ([None, None, None], [40, 40, 40], [0, 40, 80]),
        ([], [], []),
    ],
)
def test_missing_times(times: list[int | None], durations: list[int], found: list[int]) -> None:
    assert fill_missing_times(times, durations, Fraction(40)) == found


def test_the_interval_of_frames_is_exact_and_at_least_a_tick() -> None:
    assert frame_interval(Fraction(30_000, 1001), Fraction(1, 1000)) == Fraction(1001, 30)
    assert frame_interval(Fraction(5000), Fraction(1, 1000)) == 1
    assert frame_interval(None, Fraction(1, 1000)) == 40


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
    rising = MonotonicTimestamps()
    assert [rising(time) for time in times] == found
    assert rising.n_changed == n_changed
