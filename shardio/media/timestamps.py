"""Compute the presentation time of every frame, in ticks of the stream's time base."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardio.errors import MediaError

_T = TypeVar("_T")

REORDER_WINDOW = 16  # no standard in use lets a decoder delay a frame by more frames


def in_presentation_order(frames: Iterable[tuple[int, _T]]) -> Iterator[tuple[int, _T]]:
    """Assign times to frames so that times rise in presentation order.

    `frames` are pairs of (time, frame) in decoder output order, which is presentation order.
    Presentation times in a container rise already, and do not change. The times in an AVI count
    frames in *coding* order: with B-frames, they are the right times in the wrong order (1, 2, 4,
    3, …). Therefore the n-th frame gets the n-th smallest time of the next `REORDER_WINDOW` frames.

    If a time is before an already assigned time, the clock has restarted (joined recordings), and
    ordering also restarts. A MediaError of `frames` is raised after all frames before the error
    have been yielded.
    """
    waiting: deque[_T] = deque()
    times: list[int] = []
    latest: int | None = None
    failure: MediaError | None = None
    try:
        for time, frame in frames:
            if latest is not None and time < latest:
                while waiting:
                    yield heapq.heappop(times), waiting.popleft()
                latest = None
            waiting.append(frame)
            heapq.heappush(times, time)
            if len(waiting) > REORDER_WINDOW:
                latest = heapq.heappop(times)
                yield latest, waiting.popleft()
    except MediaError as error:
        failure = error
    while waiting:
        yield heapq.heappop(times), waiting.popleft()
    if failure is not None:
        raise failure


def frame_interval(rate: Fraction | None, time_base: Fraction) -> Fraction:
    """Return the ticks from one frame to the next at `rate` frames per second; at least 1.

    If `rate` is None, 25 frames per second are assumed.
    """
    return max(Fraction(1), 1 / ((rate or Fraction(25)) * time_base))


def exact_duration(duration: int | None, interval: Fraction) -> Fraction:
    """Return a duration in ticks: `interval` if the stored duration is missing or rounded."""
    if not duration or abs(duration - interval) < 1:
        return interval
    return Fraction(duration)


def round_to_tick(time: Fraction) -> int:
    """Round to whole ticks, halves up; times that are a tick or more apart stay distinct."""
    return math.floor(time + Fraction(1, 2))


def fill_missing_times(
    times: Sequence[int | None], durations: Sequence[int], interval: Fraction
) -> list[int]:
    """Return the time of every frame: as stored or, if missing, computed from its neighbours.

    Missing times before the first known time are counted back from there. Later missing times are
    counted up from the previous known time, or spread evenly if the next known time is too near. If
    no time is known, the first frame has time 0.

    Args:
        times: the stored times in ticks, in presentation order; None if missing.
        durations: in ticks; 0 if unknown.
        interval: the ticks from one frame to the next, from `frame_interval`.
    """
    found = [0 if time is None else time for time in times]
    lengths = (exact_duration(duration, interval) for duration in durations)
    places = list(accumulate(lengths, initial=Fraction(0)))

    def count(first: int, stop: int, known: int) -> None:
        for n in range(first, stop):
            found[n] = round_to_tick(found[known] + places[n] - places[known])

    known = [n for n, time in enumerate(times) if time is not None] or [0]
    count(0, known[0], known[0])
    for this, following in zip(known, [*known[1:], len(found)], strict=True):
        count(this + 1, following, this)
        if following < len(found) and found[this] < found[following] <= found[following - 1]:
            span = found[following] - found[this]
            for n in range(this + 1, following):
                found[n] = found[this] + span * (n - this) // (following - this)
    return found


class MonotonicTimestamps:
    """A callable that makes times rise strictly, as packet tables require.

    After a restart of the clock, times continue from the end of the previous frame. If a frame has
    the same time as the previous frame, it is moved by a tick. `n_changed` counts changed times.
    """

    def __init__(self) -> None:
        self.n_changed = 0
        self._given: int | None = None
        self._latest, self._step, self._shift = 0, 1, 0

    def __call__(self, time: int) -> int:
        """Return the new time of the next frame, whose stored time is `time`; both in ticks."""
        latest = self._latest
        if self._given is None:
            self._given = self._latest = time
            return time
        if time < self._given:
            self._shift = latest + self._step - time
        found = max(time + self._shift, latest + 1)
        if time > self._given:
            self._step = time - self._given
        self.n_changed += found != time
        self._given, self._latest = time, found
        return found


def frame_durations(times: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return each frame's time until the next, in ticks; the last duration is repeated."""
    found: npt.NDArray[np.int64] = np.diff(np.array([*times, 0], np.int64)).view(np.int64)
    found[-1] = found[-2] if len(found) > 1 else 1
    return found
