"""When the samples of sound are heard, by the packets they are in. Pure.

A container rounds times to its ticks, of a millisecond at worst, while the samples of a packet
follow those of the one before. So all packets together say when the first is heard: in most files
to the sample. Where packets leave a gap, there is silence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

import numpy as np
import numpy.typing as npt

from shardio.errors import MediaError
from shardio.format.streams import EncodedStream, packet_sizes

__all__ = [
    "LEAD_PACKETS",
    "Heard",
    "begin_of",
    "first_time",
    "nearest_sample",
    "packet_times",
    "part_of",
    "stream_rate",
]

LEAD_PACKETS: Final = 12
"""Decoded and dropped before a span: MP3 looks 9 packets back, Opus 80 ms."""
_AROUND: Final = 4096
"""Samples on either side of a part that a resampler may look at."""
_MAX_RATE: Final = 1 << 24
_MOST: Final = 1 << 62

_LARGEST_JITTER: Final = Fraction(1, 10)
"""Seconds that a packet may be late or early without a gap: where FFmpeg draws the line, too."""

_Numbers = npt.NDArray[np.int64]


def packet_times(
    times: Sequence[int | None],
    counts: Sequence[int],
    time_base: Fraction,
    rate: int,
    n_before: int = 0,
) -> _Numbers:
    """When the first sample of each packet is heard, in samples.

    Args:
        times: of the packets as the container has them, in ticks of `time_base`; None: unknown.
        counts: how many samples are decoded from each.
        time_base: seconds per tick.
        rate: samples per second.
        n_before: how many samples come before the first that is heard.

    Raises:
        MediaError: times go back, by more than packets are early.
    """
    heard: _Numbers = np.cumsum(np.asarray(counts, np.int64)) - counts
    found = heard.copy()
    for span in _spans(times, counts, time_base, rate):
        known = int(heard[span.first]) + (0 if span.first else n_before)
        # From here on; the next span, if there is one, has its own.
        found[span.first :] = heard[span.first :] + span.begin(known)
    return found


@dataclass(slots=True)
class _Span:
    """Packets without a gap: the first, and between what their times less what is heard lie.

    In halves of a sample's `unit`-th, of which a tick has 2 * `tick`.
    """

    first: int
    low: int
    high: int
    tick: int
    unit: int

    def begin(self, known: int) -> int:
        """When sample 0 is heard, if sample `known` is one that a container times exactly."""
        lead, tick = 2 * known * self.unit, 2 * self.tick
        at = -(-(self.low + lead) // tick) * tick - lead
        if at > self.high:
            at = (self.low + self.high) // 2
        return (at + self.unit) // (2 * self.unit)


def _spans(
    times: Sequence[int | None], counts: Sequence[int], time_base: Fraction, rate: int
) -> list[_Span]:
    """Cut packets where there are gaps, and narrow down when each part begins."""
    tick, unit = (time_base * rate).as_integer_ratio()  # a tick is so many parts of a sample
    slack = tick if unit > 1 or tick > 1 else 0  # half a tick may be lost by rounding
    jitter = 2 * unit * rate * _LARGEST_JITTER
    spans: list[_Span] = []
    heard = 0
    for i, (time, count) in enumerate(zip(times, counts, strict=True)):
        if time is not None and count:
            here = 2 * (time * tick - heard * unit)
            low, high = here - slack, here + slack
            if not spans:
                spans.append(_Span(0, low, high, tick, unit))
            span = spans[-1]
            late = here - Fraction(span.low + span.high, 2)
            if max(low, span.low) <= min(high, span.high):
                span.low, span.high = max(low, span.low), min(high, span.high)
            elif late > jitter:
                spans.append(_Span(i, low, high, tick, unit))
            elif late < -jitter:
                seconds = float(-late / (2 * unit * rate))
                raise MediaError(
                    f"its times go back by {seconds:.3f} s at packet {i}; re-encode it"
                )
        heard += count
    return spans


def stream_rate(stream: EncodedStream) -> int:
    """Samples per second of a sound.

    Raises:
        MediaError: it does not say, or what cannot be.
    """
    rate = stream.parameters.get("rate")
    if not isinstance(rate, int) or not 0 < rate <= _MAX_RATE:
        raise MediaError(f"a stream's rate is {rate!r}: expected samples per second")
    return rate


def first_time(stream: EncodedStream) -> int:
    """When sample 0 of a sound is heard, in samples: ticks of its time base."""
    first = int(stream.packets["pts"][0]) if len(stream.packets) else 0
    return first + whole_parameter(stream, "skip")


def whole_parameter(stream: EncodedStream, name: str, default: int = 0) -> int:
    """Read a whole number of the parameters.

    Raises:
        MediaError: it is there and is none.
    """
    found = stream.parameters.get(name, default)
    if type(found) is not int or abs(found) > _MOST:
        raise MediaError(f"a stream's {name} is {found!r}: expected a whole number")
    return found


def begin_of(stream: EncodedStream) -> Fraction:
    """When a sound begins, in seconds: with its sample 0, unless it is a part that says when.

    Raises:
        MediaError: what it says is no time.
    """
    text = stream.parameters.get("begin")
    if text is None:
        return Fraction(first_time(stream), stream_rate(stream))
    over, _, under = str(text).partition(":")
    try:
        return Fraction(int(over), int(under))
    except (ValueError, ZeroDivisionError) as error:
        raise MediaError(
            f"a stream's begin is {text!r}: expected seconds such as '1:25'"
        ) from error


def nearest_sample(stream: EncodedStream, time: Fraction, rate: int) -> int:
    """The number of the sample of `rate`, counted from sample 0, that is nearest to a time."""
    since = time - Fraction(first_time(stream), stream_rate(stream))
    return math.floor(since * rate + Fraction(1, 2))


def part_of(stream: EncodedStream, begin: Fraction, seconds: Fraction) -> EncodedStream | None:
    """The packets of a sound from a time on, untouched, and what decoding them needs.

    Samples keep their times and values. None where there is nothing to be heard.

    Args:
        stream: a whole sound.
        begin: seconds, on the clock of its `pts`.
        seconds: how long the part is.
    """
    rate, heard = stream_rate(stream), Heard(stream)
    start = nearest_sample(stream, begin, rate)
    stop = start + math.floor(seconds * rate + Fraction(1, 2))
    low, high = max(start, heard.extent[0]), min(stop, heard.extent[1])
    if low >= high:
        return None
    around = heard.packets(low - _AROUND, high + _AROUND)
    chosen = slice(max(0, around.start - LEAD_PACKETS), around.stop)
    packets = stream.packets[chosen].copy()
    base = int(packets["offset"][0])
    size = int(packet_sizes(packets).sum())
    packets["offset"] -= packets["offset"][0]
    parameters = {
        **stream.parameters,
        "skip": first_time(stream) - int(packets["pts"][0]),
        "samples": stream.n_frames,
        "begin": f"{begin.numerator}:{begin.denominator}",
    }
    return replace(
        stream,
        parameters=parameters,
        packets=packets,
        data=bytes(stream.data[base : base + size]),
        n_frames=stop - start,
        duration=stop - start,
    )


class Heard:
    """Where the samples of each packet stand among those of a whole sound, gaps counted."""

    def __init__(self, stream: EncodedStream) -> None:
        self.starts: _Numbers = stream.packets["pts"] - first_time(stream)
        self.counts: _Numbers = stream.packets["duration"].astype(np.int64)
        self.ends: _Numbers = self.starts + self.counts
        some = self.starts[self.counts > 0]
        first = max(0, int(some[0])) if len(some) else 0
        n_all = whole_parameter(stream, "samples", stream.n_frames)
        last = int(self.ends.max(initial=0))
        self.extent = first, max(first, min(n_all, last))
        """From which to which sample there is sound."""

    def packets(self, start: int, stop: int) -> range:
        """Those that samples `start` to `stop` are in, and perhaps one more."""
        begin = int(np.searchsorted(self.ends, start, "right"))
        end = int(np.searchsorted(self.ends, stop, "left")) + 1
        return range(begin, min(len(self.ends), end))
