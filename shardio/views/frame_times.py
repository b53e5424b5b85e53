"""When the frames of a video are shown, and which of them are on show at given times. Pure.

Times are exact: whole ticks of a stream's time base, or fractions of a tick. A frame is on show
from its time until that of the next one, the last one until the end of the video. So of a time
between two ticks nothing but the tick before it counts, and no time is ever a float.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio._base.classes import cached
from shardio.errors import MediaError
from shardio.format.streams import EncodedStream, PacketFlag, packet_flags

Numbers = npt.NDArray[np.int64]

_MAX_TICKS: Final = (1 << 63) - 1
_SAFE: Final = float(1 << 62)
"""Products below it are exact in 64 bits, however the float that tells so was rounded."""


class FrameTimes:
    """When each frame of a video is shown. Immutable.

    `pts` are the ticks of all frames, ascending; several may have the same, and then only the last
    of them is ever on show. `time_base` is seconds per tick, `length` ticks from the first frame to
    the end of the last.

    Raises:
        MediaError: the table of packets counts other frames than the stream.
    """

    def __init__(self, stream: EncodedStream) -> None:
        packets = stream.packets
        shown = packets[(packet_flags(packets) & PacketFlag.HIDDEN) == 0]
        order = np.argsort(shown["pts"], kind="stable")
        if len(order) != stream.n_frames or not len(order):
            raise MediaError(
                f"a table of packets holds {len(order)} frames; expected {stream.n_frames}"
            )
        self.pts: Numbers = shown["pts"][order]
        self.time_base = stream.time_base
        self._begin = int(self.pts[0])
        last = int(shown["duration"][order[-1]])
        self.length = int(stream.duration) or self._length(last)
        self._fps, self._every = Fraction(0), Fraction(0)

    def _length(self, last: int) -> int:
        """Ticks from the first frame to the end; the last is shown for so many, 0 if unknown.

        Then as long as the one before it, and alone for one tick.
        """
        end, times = int(self.pts[-1]), self.pts[self._seen[-2:]].tolist()
        return end - self._begin + (last or (times[1] - times[0] if len(times) > 1 else 1))

    @cached
    def _seen(self) -> Numbers:
        """The frames that are on show at some time."""
        return np.flatnonzero(np.append(self.pts[1:] != self.pts[:-1], True))

    def ticks_at(self, fps: Fraction) -> Fraction:
        """The ticks from one of `fps` times per second to the next."""
        if fps is not self._fps:  # that of all clips of a loader is the same object
            self._fps, self._every = fps, 1 / (fps * self.time_base)
        return self._every

    def after_start(self, frame: int) -> int:
        """The ticks from the first frame to another."""
        return int(self.pts[frame]) - self._begin

    def on_show(self, first: Fraction, every: Fraction, n: int) -> Numbers:
        """The frames on show at n times.

        Args:
            first: ticks from the first frame to the first time, from 0 up.
            every: ticks from one time to the next.
            n: how many.
        """
        start, parts = first.as_integer_ratio()
        step, step_parts = every.as_integer_ratio()
        start, step, parts = start * step_parts, step * parts, parts * step_parts
        ticks = [min(self._begin + (start + i * step) // parts, _MAX_TICKS) for i in range(n)]
        return np.searchsorted(self.pts, np.array(ticks, np.int64), "right") - 1

    def inside(self, first: Fraction, reach: Fraction) -> Fraction:
        """`first`, or the nearest time from which the video goes on for more than `reach` ticks.

        At the end that is the last whole tick. The video is longer than `reach`.
        """
        if first < 0:
            return Fraction(0)
        return first if first + reach < self.length else Fraction(self._latest(reach))

    def start_at_share(self, part: int, of: int, reach: Fraction) -> Fraction:
        """The time of one of the frames after whose time the video goes on for more than `reach`.

        It has `part` of `of` of them before it, rounded down. The video is longer than `reach`.
        """
        latest = min(self._begin + self._latest(reach), _MAX_TICKS)
        n_starts = int(np.searchsorted(self.pts[self._seen], latest, "right"))
        return Fraction(self.after_start(int(self._seen[part * n_starts // of])))

    def _latest(self, reach: Fraction) -> int:
        return self.length - 1 - math.floor(reach)


def n_times(
    lengths: npt.NDArray[np.uint64],
    numerators: npt.NDArray[np.uint32],
    denominators: npt.NDArray[np.uint32],
    fps: Fraction,
) -> Numbers:
    """How many of the times 0, 1 / fps, 2 / fps, … come before the end of each video.

    Args:
        lengths: of the videos, in ticks.
        numerators, denominators: of their time bases.
        fps: times per second; both its parts are below 2^31.

    What is beyond 63 bits is 2^63 - 1.
    """
    dividends = numerators.astype(np.int64) * fps.numerator
    divisors = denominators.astype(np.int64) * fps.denominator
    is_safe = lengths.astype(np.float64) * dividends.astype(np.float64) < _SAFE
    found = np.empty(len(lengths), np.int64)
    products = lengths[is_safe].astype(np.int64) * dividends[is_safe]
    found[is_safe] = -(-products // np.maximum(divisors[is_safe], 1))
    for i in np.flatnonzero(~is_safe).tolist():
        exact = -(-int(lengths[i]) * int(dividends[i]) // int(divisors[i]))
        found[i] = min(exact, _MAX_TICKS)
    return found
