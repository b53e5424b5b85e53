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

REORDER_WINDOW = 16  # in every standard in use, a decoder delays a frame by at most 16 frames


def in_presentation_order(frames: Iterable[tuple[int, _T]]) -> Iterator[tuple[int, _T]]:
    """Assign the times of frames anew, so that the times rise in presentation order.

    `frames` are pairs of (time, frame) in the order in which a decoder outputs them, which is the
    presentation order. The times in an AVI count frames in the order of *coding*: with B-frames,
    they belong to other frames (1, 2, 4, 3, …). Therefore each frame gets the smallest time that is
    not assigned yet, among its own and those of the next `REORDER_WINDOW` frames.

    A time before the last assigned time means that two recordings were joined: ordering starts
    again. If `frames` raises MediaError, the frames before the error are yielded first.
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
    """Return the ticks from one frame to the next at `rate` (default 25) per second; at least 1."""
    return max(Fraction(1), 1 / ((rate or Fraction(25)) * time_base))


def exact_duration(duration: int | None, interval: Fraction) -> Fraction:
    """Return the exact duration of a frame, in ticks.

    This is `interval` if `duration` is 0, None or less than a tick from `interval`.
    """
    if not duration or abs(duration - interval) < 1:
        return interval
    return Fraction(duration)


def round_to_tick(time: Fraction) -> int:
    """Round to a whole tick, halves up. Times that are a tick or more apart stay different."""
    return math.floor(time + Fraction(1, 2))


def fill_missing_times(
    times: Sequence[int | None], durations: Sequence[int], interval: Fraction
) -> list[int]:
    """Return the time of every frame: the stored time or, if it is missing, a computed time.

    Durations are added to the previous known time; before the first known time, they are subtracted
    from it. If computed times reach the next known time, they are spread evenly before it instead.
    If no time is known, the first frame gets time 0. `times` are in presentation order, None if
    missing; durations are 0 if unknown.
    """
    found = [0 if time is None else time for time in times]
    lengths = (exact_duration(duration, interval) for duration in durations)
    ticks = list(accumulate(lengths, initial=Fraction(0)))

    def fill(first: int, stop: int, known: int) -> None:
        for n in range(first, stop):
            found[n] = round_to_tick(found[known] + ticks[n] - ticks[known])

    known = [n for n, time in enumerate(times) if time is not None] or [0]
    fill(0, known[0], known[0])
    for this, following in zip(known, [*known[1:], len(found)], strict=True):
        fill(this + 1, following, this)
        if following < len(found) and found[this] < found[following] <= found[following - 1]:
            span = found[following] - found[this]
            for n in range(this + 1, following):
                found[n] = found[this] + span * (n - this) // (following - this)
    return found


class MonotonicTimestamps:
    """A callable that changes times so that they rise strictly, as `StreamEncoder` requires.

    If the time of a frame is before the previous time, the clock has restarted: this and later
    frames are moved after the previous frame. If two times are equal, the second is moved by one
    tick. `n_changed` is the number of times that were changed.
    """

    def __init__(self) -> None:
        self.n_changed = 0
        self._latest_stored: int | None = None
        self._latest, self._step, self._shift = 0, 1, 0

    def __call__(self, time: int) -> int:
        """Return the new time, in ticks, of the next frame, which has the stored time `time`."""
        latest = self._latest
        if self._latest_stored is None:
            self._latest_stored = self._latest = time
            return time
        if time < self._latest_stored:
            self._shift = latest + self._step - time
        found = max(time + self._shift, latest + 1)
        if time > self._latest_stored:
            self._step = time - self._latest_stored
        self.n_changed += found != time
        self._latest_stored, self._latest = time, found
        return found


def frame_durations(times: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the ticks from each frame to the next; the last is as long as its predecessor."""
    found: npt.NDArray[np.int64] = np.diff(np.array([*times, 0], np.int64)).view(np.int64)
    found[-1] = found[-2] if len(found) > 1 else 1
    return found
